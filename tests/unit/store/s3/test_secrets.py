"""No key, token or signature stands in an error or in a log, whatever the server says."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Awaitable, Callable

import pytest

from shalekv.errors import StoreError
from shalekv.store.api import Unknown
from shalekv.store.s3.store import S3Store
from tests.kit.inline_runtime import gathered
from tests.kit.s3.opening import opened
from tests.kit.s3.scripted_server import Broken, Reply, Request, refused, scripted
from tests.unit.store.s3.conftest import ACCESS_KEY, SECRET_KEY, TOKEN
from tests.unit.store.s3.test_answers import FOR_GOOD, PASSING

CODES = [(status, code) for status, code, _ in FOR_GOOD] + PASSING
CALLS = ("create", "put", "get", "get_range", "head", "list", "delete", "copy", "now")


def gossip(request: Request) -> str:
    """A message that repeats all that the request said of its sender."""
    signed = request.headers.get("authorization", "")
    return f"{ACCESS_KEY} {SECRET_KEY} {TOKEN} {signed} ?X-Amz-Signature={signed[-64:]}"


async def told(s3: S3Store, call: str) -> str:
    """All that a failed call says, tracebacks included."""
    calls: dict[str, Callable[[], Awaitable[object]]] = {
        "create": lambda: s3.create("levels/1", b"x"),
        "put": lambda: s3.put("wal/1", b"x"),
        "get": lambda: s3.get("wal/1"),
        "get_range": lambda: s3.get_range("wal/1", -4, 4),
        "head": lambda: s3.head("wal/1"),
        "list": lambda: gathered(s3.list("wal/")),
        "delete": lambda: s3.delete(["wal/1"]),
        "copy": lambda: s3.copy("wal/1", "wal/2"),
        "now": s3.now_ms,
    }
    try:
        outcome = await calls[call]()
    except StoreError as error:
        return "".join(traceback.format_exception(error))
    assert isinstance(outcome, Unknown), outcome
    return outcome.cause


def assert_discreet(text: str) -> None:
    """Nothing in it lets anybody sign."""
    for secret in (ACCESS_KEY, SECRET_KEY, TOKEN, "Signature=", "AWS4-HMAC"):
        assert secret not in text


@pytest.mark.parametrize(("status", "code"), CODES)
async def test_errors(status: int, code: str, caplog: pytest.LogCaptureFixture) -> None:
    """Errors of every kind from every call say none, and nor do logs at the level of debugging."""
    caplog.set_level(logging.DEBUG)
    logging.getLogger("botocore").setLevel(logging.NOTSET)
    logging.getLogger("aiobotocore").setLevel(logging.NOTSET)

    def answer(request: Request) -> Reply:
        return refused(status, code, gossip(request))

    async with scripted(answer) as server, opened(server.endpoint) as s3:
        for call in CALLS:
            assert_discreet(await told(s3, call))
        signed = [request.headers for request in server.requests]
    assert all(ACCESS_KEY in headers["authorization"] for headers in signed)
    assert all(headers["x-amz-security-token"] == TOKEN for headers in signed)
    assert_discreet(caplog.text)


async def test_broken_connections(caplog: pytest.LogCaptureFixture) -> None:
    """Nor does what is said of a connection that breaks or answers nonsense."""
    caplog.set_level(logging.DEBUG)

    def broken(_: Request) -> Reply:
        raise Broken

    async with scripted(broken) as server, opened(server.endpoint) as s3:
        for call in CALLS:
            assert_discreet(await told(s3, call))
        server.answer = lambda request: Reply(500, gossip(request).encode())
        for call in CALLS:
            assert_discreet(await told(s3, call))
    assert_discreet(caplog.text)


async def test_refused_deletions() -> None:
    """Nor does what is said of one object among many."""

    def answer(request: Request) -> Reply:
        entry = f"<Key>folder/wal/1</Key><Code>Odd</Code><Message>{gossip(request)}</Message>"
        return Reply(200, f"<DeleteResult><Error>{entry}</Error></DeleteResult>".encode())

    async with scripted(answer) as server, opened(server.endpoint) as s3:
        assert_discreet(await told(s3, "delete"))
