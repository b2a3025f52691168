"""Two stores of one process with credentials of their own, as a backup from S3 to S3 needs."""

from __future__ import annotations

from pathlib import Path

import pytest

from shalekv.errors import StoreRefused
from tests.kit.s3.opening import opened
from tests.kit.s3.scripted_server import Request, found, scripted


def key_of(request: Request) -> str:
    """Whose key has signed it."""
    return request.headers["authorization"].partition("Credential=")[2].partition("/")[0]


async def test_each_store_has_the_credentials_of_its_profile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The environment counts where no profile is set, whatever it says of profiles."""
    file = tmp_path / "credentials"
    file.write_text(
        "".join(
            f"[{name}]\naws_access_key_id = key-of-{name}\naws_secret_access_key = secret\n"
            for name in ("one", "other")
        )
    )
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(file))
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key-of-nobody")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    async with (
        scripted(lambda _: found(b"x")) as server,
        opened(server.endpoint, aws_profile="one") as one,
        opened(server.endpoint, aws_profile="other") as other,
        opened(server.endpoint) as neither,
    ):
        for store in (one, other, neither, one):
            await store.get("wal/1")
        keys = [key_of(request) for request in server.requests]
    assert keys == ["key-of-one", "key-of-other", "key-of-nobody", "key-of-one"]


async def test_a_profile_that_is_not_there_is_told() -> None:
    """Nothing is sent then, with whatever credentials."""
    async with (
        scripted(lambda _: found(b"x")) as server,
        opened(server.endpoint, aws_profile="missing") as store,
    ):
        with pytest.raises(StoreRefused, match="profile not found"):
            await store.get("wal/1")
        assert server.requests == []
