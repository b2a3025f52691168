"""Buckets of Google and Azure are opened with the credentials of the environment, or not at all."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from shalekv.errors import InvalidSetting, StoreRefused, StoreUnavailable
from shalekv.settings import StoreSettings
from shalekv.store.obstores.opening import open_bucket
from shalekv.store.url import BucketUrl, Provider
from tests.kit.inline_runtime import inline_runtime
from tests.kit.s3.scripted_server import Reply, scripted
from tests.unit.store.obstores.conftest import AZURE_KEY
from tests.unit.store.obstores.test_answers import BOTH, open_at


@pytest.mark.parametrize(("provider", "extra"), [("gs", "gcs"), ("az", "azure")])
def test_a_missing_package(provider: str, extra: str) -> None:
    """Without obstore, a bucket is not opened, and the error says what to install."""
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
    """An endpoint that is no plain address is refused, and what may be a secret is not told."""
    with pytest.raises(InvalidSetting, match="endpoint_url") as raised:
        open_at(provider, endpoint)
    assert "pass" not in str(raised.value)


def test_no_account(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the name of an account there is no container, and the error names the variable."""
    monkeypatch.delenv("AZURE_STORAGE_ACCOUNT_NAME", raising=False)
    with pytest.raises(InvalidSetting, match="AZURE_STORAGE_ACCOUNT_NAME"):
        open_at(Provider.AZURE, "")


@pytest.mark.usefixtures("azure_account")
def test_a_key_that_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """A key that cannot be read is refused, and not told."""
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", "not a key")
    with pytest.raises(InvalidSetting) as raised:
        open_at(Provider.AZURE, "")
    assert "not a key" not in str(raised.value)


def test_credentials_of_google_that_are_none(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A file of credentials that cannot be read is refused, and the error names the variable."""
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(tmp_path / "none.json"))
    with pytest.raises(InvalidSetting, match="GOOGLE_APPLICATION_CREDENTIALS"):
        open_at_google("")


def open_at_google(endpoint: str) -> object:
    place = BucketUrl(Provider.GOOGLE, "bucket", "database")
    return open_bucket(place, inline_runtime(), StoreSettings(endpoint_url=endpoint))


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


@pytest.mark.parametrize(("status", "kind"), [(400, StoreRefused), (503, StoreUnavailable)])
async def test_a_token_that_is_not_issued(
    monkeypatch: pytest.MonkeyPatch, status: int, kind: type[Exception]
) -> None:
    """Without a token nothing was created: the error is of the credentials, and certain."""
    answer = json.dumps({"error": "invalid_grant", "error_description": "S3CRET"})
    async with scripted(lambda _: Reply(status, answer.encode())) as server:
        monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "account")
        monkeypatch.setenv("AZURE_STORAGE_CLIENT_ID", "id")
        monkeypatch.setenv("AZURE_STORAGE_CLIENT_SECRET", "S3CRET")
        monkeypatch.setenv("AZURE_STORAGE_TENANT_ID", "tenant")
        monkeypatch.setenv("AZURE_STORAGE_AUTHORITY_HOST", server.endpoint)
        store = open_at(Provider.AZURE, server.endpoint)
        with pytest.raises(kind, match=f"no token .* {status} invalid_grant.*clock") as raised:
            await store.create("wal/1.sst", b"x")
        assert [request.target for request in server.requests] == ["/tenant/oauth2/v2.0/token"]
        assert "S3CRET" not in str(raised.value)
        await store.close()


async def test_a_file_with_a_token_that_is_missing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A token that cannot be read from its file is a refusal: nothing was sent."""
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "account")
    monkeypatch.setenv("AZURE_STORAGE_CLIENT_ID", "id")
    monkeypatch.setenv("AZURE_STORAGE_TENANT_ID", "tenant")
    monkeypatch.setenv("AZURE_FEDERATED_TOKEN_FILE", str(tmp_path / "none"))
    async with scripted(lambda _: Reply(201)) as server:
        store = open_at(Provider.AZURE, server.endpoint)
        with pytest.raises(StoreRefused, match="no token"):
            await store.create("wal/1.sst", b"x")
        assert server.requests == []
        await store.close()
