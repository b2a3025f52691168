"""Credentials that come from somewhere: whatever fails there, nothing was sent to the store."""

from __future__ import annotations

import logging
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from shalekv.errors import StoreError, StoreRefused, StoreUnavailable
from shalekv.store.api import Created
from tests.kit.s3.credential_program import (
    FAILING,
    GOOD,
    KEYS,
    SECRET,
    STALE,
    Program,
    program_in,
    saying,
)
from tests.kit.s3.opening import opened
from tests.kit.s3.scripted_server import Reply, refused, scripted, stored


@pytest.fixture(autouse=True)
def _no_keys(monkeypatch: pytest.MonkeyPatch, credentials: None) -> None:  # noqa: ARG001
    for name in ("ACCESS_KEY_ID", "SECRET_ACCESS_KEY", "SESSION_TOKEN"):
        monkeypatch.delenv(f"AWS_{name}")


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Program:
    """Sets the shell script that is the source of credentials."""
    return program_in(tmp_path, monkeypatch)


async def test_they_are_looked_for_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A process that has found no credentials finds those that come later."""
    file = tmp_path / "credentials"
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(file))
    async with scripted(lambda _: stored()) as server, opened(server.endpoint) as s3:
        with pytest.raises(StoreRefused, match="no credentials"):
            await s3.create("wal/1", b"x")
        file.write_text(KEYS)
        assert await s3.create("wal/1", b"x") == Created()
        assert len(server.requests) == 1


@pytest.mark.parametrize("text", FAILING)
async def test_a_program_that_fails(
    program: Program, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever a source of credentials says instead, it is an error that may pass, and passes."""
    program(text)
    async with scripted(lambda _: stored()) as server, opened(server.endpoint) as s3:
        with pytest.raises(StoreUnavailable, match="source of credentials") as raised:
            await s3.create("wal/1", b"x")
        assert SECRET not in str(raised.value) + caplog.text
        assert s3.sent.total == len(server.requests) == 0
        program(saying(GOOD))
        assert await s3.create("wal/1", b"x") == Created()


async def test_a_renewal_that_fails(program: Program, caplog: pytest.LogCaptureFixture) -> None:
    """What was good and is too old is renewed before a request, and a failure is not told in the
    program's own words, which may hold secrets.
    """
    soon = datetime.now(UTC) + timedelta(seconds=5)  # botocore renews earlier than that
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
        (refused(404, "NoSuchKey"), StoreRefused),
        (refused(400, "ExpiredTokenException"), StoreRefused),
        (Reply(404, b"<html>"), StoreUnavailable),
    ],
)
async def test_answers_of_another_service(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, reply: Reply, raised: type[StoreError]
) -> None:
    """What the source of credentials answers is no answer of the store: no object exists by it."""
    token = tmp_path / "token"
    token.write_text("a token")
    monkeypatch.setenv("AWS_ROLE_ARN", "arn:aws:iam::123456789012:role/writer")
    monkeypatch.setenv("AWS_WEB_IDENTITY_TOKEN_FILE", str(token))
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    async with scripted(lambda _: reply) as source, scripted(lambda _: stored()) as server:
        monkeypatch.setenv("AWS_ENDPOINT_URL_STS", source.endpoint)
        async with opened(server.endpoint) as s3:
            with pytest.raises(raised, match="source of credentials"):
                await s3.create("wal/1", b"x")
        assert source.requests
        assert not server.requests


async def test_a_token_that_is_missing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A file that is named and is not there is to be mended, and is no broken connection."""
    monkeypatch.setenv("AWS_ROLE_ARN", "arn:aws:iam::123456789012:role/writer")
    monkeypatch.setenv("AWS_WEB_IDENTITY_TOKEN_FILE", str(tmp_path / "none"))
    async with scripted(lambda _: stored()) as server, opened(server.endpoint) as s3:
        with pytest.raises(StoreRefused, match="source of credentials"):
            await s3.create("wal/1", b"x")
