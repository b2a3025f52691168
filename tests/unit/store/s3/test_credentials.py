"""Credentials of the environment, of profiles and of programs; when these fail, nothing is sent."""

from __future__ import annotations

import logging
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from shalekv.errors import StoreError, StoreRefused, StoreUnavailable
from shalekv.store.api import Created
from tests.kit.s3.opening import (
    FAILING,
    GOOD,
    KEYS,
    SECRET,
    STALE,
    Program,
    opened,
    program_in,
    saying,
)
from tests.kit.s3.scripted_server import Reply, found, refused, scripted, stored

NO_OBJECT = refused(404, "NoSuchKey")


@pytest.fixture(autouse=True)
def _no_keys(monkeypatch: pytest.MonkeyPatch, credentials: None) -> None:  # noqa: ARG001
    for name in ("ACCESS_KEY_ID", "SECRET_ACCESS_KEY", "SESSION_TOKEN"):
        monkeypatch.delenv(f"AWS_{name}")


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Program:
    """Set the shell script that is the source of credentials."""
    return program_in(tmp_path, monkeypatch)


async def test_missing_credentials_are_searched_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Without credentials nothing is sent, and the error says where they are searched. Later
    credentials are found, and an anonymous store needs none.
    """
    file = tmp_path / "credentials"
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(file))
    async with scripted(lambda _: stored()) as server, opened(server.endpoint) as s3:
        for call in (s3.create("wal/1", b"x"), s3.get("wal/1")):
            with pytest.raises(StoreRefused, match=r"no credentials were found.*--anonymous"):
                await call
        assert s3.sent.total == len(server.requests) == 0
        async with opened(server.endpoint, anonymous=True) as anonymous:
            assert await anonymous.create("wal/1", b"x") == Created()
            assert "authorization" not in server.requests[0].headers
        file.write_text(KEYS)
        assert await s3.create("wal/1", b"x") == Created()
        assert "authorization" in server.requests[1].headers


@pytest.mark.parametrize("text", FAILING)
async def test_a_program_that_fails(
    program: Program, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Any unexpected output of a source of credentials is a transient error, after which a retry
    succeeds.
    """
    program(text)
    async with scripted(lambda _: stored()) as server, opened(server.endpoint) as s3:
        with pytest.raises(StoreUnavailable, match="source of credentials") as raised:
            await s3.create("wal/1", b"x")
        assert SECRET not in str(raised.value) + caplog.text
        assert s3.sent.total == len(server.requests) == 0
        program(saying(GOOD))
        assert await s3.create("wal/1", b"x") == Created()


async def test_a_renewal_that_fails(program: Program, caplog: pytest.LogCaptureFixture) -> None:
    """Old credentials are renewed before a request. A failure of that is reported without the
    program's own text, which may hold secrets.
    """
    soon = datetime.now(UTC) + timedelta(minutes=5)  # botocore renews earlier than that
    program(saying({**STALE, "Expiration": soon.isoformat()}))
    async with scripted(lambda _: stored()) as server, opened(server.endpoint) as s3:
        assert await s3.create("wal/1", b"x") == Created()
        program(f"echo {SECRET} >&2; exit 1")
        with caplog.at_level(logging.DEBUG), pytest.raises(StoreUnavailable, match="source of cre"):
            await s3.create("wal/2", b"x")
        assert SECRET not in caplog.text
        assert len(server.requests) == 1


@pytest.mark.parametrize(
    ("reply", "raised"),
    [
        (refused(412, "PreconditionFailed"), StoreRefused),
        (NO_OBJECT, StoreRefused),
        (refused(400, "ExpiredTokenException"), StoreRefused),
        (Reply(404, b"<html>"), StoreUnavailable),
        (None, StoreRefused),  # the file with the token is missing
    ],
)
async def test_answers_of_another_service(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, reply: Reply | None, raised: type[StoreError]
) -> None:
    """An answer of the source of credentials is no answer of the store: it does not mean that an
    object exists.
    """
    token = tmp_path / "token"
    if reply is not None:
        token.write_text("a token")
    monkeypatch.setenv("AWS_ROLE_ARN", "arn:aws:iam::123456789012:role/writer")
    monkeypatch.setenv("AWS_WEB_IDENTITY_TOKEN_FILE", str(token))
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    async with (
        scripted(lambda _: reply or NO_OBJECT) as source,
        scripted(lambda _: stored()) as server,
    ):
        monkeypatch.setenv("AWS_ENDPOINT_URL_STS", source.endpoint)
        async with opened(server.endpoint) as s3:
            with pytest.raises(raised, match="source of credentials"):
                await s3.create("wal/1", b"x")
        assert bool(source.requests) == (reply is not None)
        assert not server.requests


async def test_each_store_has_the_credentials_of_its_profile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The environment counts where no profile is set; with a missing profile nothing is sent."""
    file = tmp_path / "credentials"
    profile = "[{0}]\naws_access_key_id = key-of-{0}\naws_secret_access_key = secret\n"
    file.write_text(profile.format("one") + profile.format("other"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(file))
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key-of-nobody")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    async with (
        scripted(lambda _: found(b"x")) as server,
        opened(server.endpoint, aws_profile="one") as one,
        opened(server.endpoint, aws_profile="other") as other,
        opened(server.endpoint, aws_profile="missing") as missing,
        opened(server.endpoint) as neither,
    ):
        for store in (one, other, neither, one):
            await store.get("wal/1")
        with pytest.raises(StoreRefused, match="profile not found"):
            await missing.get("wal/1")
        signed = [request.headers["authorization"] for request in server.requests]
    keys = [each.partition("Credential=")[2].partition("/")[0] for each in signed]
    assert keys == ["key-of-one", "key-of-other", "key-of-nobody", "key-of-one"]
