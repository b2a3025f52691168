"""Buckets of Google and Azure are opened with the credentials of the environment, or not at all."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from shalekv.errors import InvalidSetting, StoreRefused, StoreUnavailable
from shalekv.settings import StoreSettings
from shalekv.store.obstore.opening import open_bucket
from shalekv.store.url import BucketUrl, Provider
from tests.kit.inline_runtime import inline_runtime
from tests.kit.s3.scripted_server import Reply, scripted
from tests.unit.store.obstore.conftest import AZURE_KEY
from tests.unit.store.obstore.test_answers import BOTH, open_at


@pytest.mark.parametrize(("provider", "extra"), [("gs", "gcs"), ("az", "azure")])
def test_a_missing_package(provider: str, extra: str) -> None:
    """Without obstore a bucket is not opened, and the error says what to install."""
    program = (
        "import sys; sys.modules['obstore'] = None\n"
        "from shalekv.runtime import Runtime\n"
        "from shalekv.settings import StoreSettings\n"
        "from shalekv.store.opening import open_store\n"
        f"open_store('{provider}://bucket/folder', None, StoreSettings())\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program], check=False, capture_output=True, text=True
    )
    assert f"InvalidSetting: {provider}://bucket/folder" in ended.stderr
    assert f"pip install 'shalekv[{extra}]'" in ended.stderr


@BOTH
@pytest.mark.usefixtures("azure_account")
@pytest.mark.parametrize(
    "endpoint",
    ["localhost:4443", "ftp://host", "http://", "https://me:pass@host", "https://host/?sig=pass"],
)
def test_bad_endpoints(provider: Provider, endpoint: str) -> None:
    """An endpoint that is no plain address is refused, and the error shows no secret."""
    with pytest.raises(InvalidSetting, match="endpoint_url") as raised:
        open_at(provider, endpoint)
    assert "pass" not in str(raised.value)


@pytest.mark.usefixtures("azure_account")
@pytest.mark.parametrize(
    ("provider", "variable", "value", "problem"),
    [
        (Provider.AZURE, "AZURE_STORAGE_ACCOUNT_NAME", "", "AZURE_STORAGE_ACCOUNT_NAME"),
        (Provider.AZURE, "AZURE_STORAGE_ACCOUNT_KEY", "not a key", "az://bucket"),
        (
            Provider.GOOGLE,
            "GOOGLE_APPLICATION_CREDENTIALS",
            "/nowhere/none.json",
            "GOOGLE_APPLICATION_CREDENTIALS",
        ),
    ],
)
def test_credentials_that_are_none(
    monkeypatch: pytest.MonkeyPatch, provider: Provider, variable: str, value: str, problem: str
) -> None:
    """Without an account, or with credentials that cannot be read, a bucket is not opened. The
    error names the variable and shows no key.
    """
    monkeypatch.setenv(variable, value)
    if not value:
        monkeypatch.delenv(variable)
    with pytest.raises(InvalidSetting, match=problem) as raised:
        open_bucket(BucketUrl(provider, "bucket", "database"), inline_runtime(), StoreSettings())
    assert "not a key" not in str(raised.value)


@pytest.mark.usefixtures("azure_account")
async def test_keys_of_the_environment_are_used() -> None:
    """Requests to Azure are signed with the key of the environment, which is not sent."""
    async with scripted(lambda _: Reply(201)) as server:
        store = open_at(Provider.AZURE, server.endpoint)
        await store.create("wal/1.sst", b"x")
        (request,) = server.requests
        assert (request.method, request.target) == ("PUT", "/bucket/database/wal/1.sst")
        assert request.headers["authorization"].startswith("SharedKey account:")
        assert AZURE_KEY not in str(request.headers)
        await store.close()


@pytest.mark.parametrize(
    ("status", "kind", "problem"),
    [
        (400, StoreRefused, "no token .* 400 invalid_grant.*clock"),
        (503, StoreUnavailable, "no token .* 503 invalid_grant.*clock"),
        (None, StoreRefused, "no token"),  # the file with the token is missing
    ],
)
async def test_a_token_that_is_not_issued(
    monkeypatch: pytest.MonkeyPatch, status: int | None, kind: type[Exception], problem: str
) -> None:
    """Without a token nothing was created: the error is about the credentials, and certain."""
    answer = json.dumps({"error": "invalid_grant", "error_description": "S3CRET"})
    async with scripted(lambda _: Reply(status or 201, answer.encode())) as server:
        variables = {"ACCOUNT_NAME": "account", "CLIENT_ID": "id", "TENANT_ID": "tenant"}
        if status is None:
            monkeypatch.setenv("AZURE_FEDERATED_TOKEN_FILE", "/nowhere/none")
        else:
            variables |= {"CLIENT_SECRET": "S3CRET", "AUTHORITY_HOST": server.endpoint}
        for name, value in variables.items():
            monkeypatch.setenv(f"AZURE_STORAGE_{name}", value)
        store = open_at(Provider.AZURE, server.endpoint)
        with pytest.raises(kind, match=problem) as raised:
            await store.create("wal/1.sst", b"x")
        asked = [] if status is None else ["/tenant/oauth2/v2.0/token"]
        assert [request.target for request in server.requests] == asked
        assert "S3CRET" not in str(raised.value)
        await store.close()
