"""Records in DynamoDB, when credentials are missing or another server answers."""

from __future__ import annotations

import json
import logging
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from shalekv.errors import StoreError, StoreRefused, StoreUnavailable
from shalekv.protocol.two_phase import CreateRecord, Destination
from shalekv.settings import CasChoice, StoreSettings
from shalekv.store.two_phase.opening import open_records
from shalekv.store.two_phase.records import Inserted, InsertUnknown, RecordStore
from tests.kit.inline_runtime import gathered
from tests.kit.s3.opening import (
    SECRET,
    STALE,
    Program,
    forget_aws,
    program_in,
    real_runtime,
    saying,
)
from tests.kit.s3.scripted_server import Broken, Reply, Request, ScriptedServer, scripted

RECORD = CreateRecord(Destination("s3://bucket", "wal/1"), "wal/1.source")
CALLS: dict[str, Callable[[RecordStore], Awaitable[object]]] = {
    "insert": lambda records: records.insert(RECORD),
    "find": lambda records: records.find(RECORD.destination),
    "commit": lambda records: records.commit(RECORD),
    "take_over": lambda records: records.take_over(RECORD, "wal/1.other"),
    "withdraw": lambda records: records.withdraw(RECORD),
    "delete_committed": lambda records: records.delete_committed([RECORD.destination]),
    "list": lambda records: gathered(records.list("s3://bucket", uncommitted_only=False)),
}
KEY_SCHEMA = [
    {"KeyType": "HASH", "AttributeName": "database"},
    {"KeyType": "RANGE", "AttributeName": "destination"},
]
HTML = b"<html>Sign in to the hotel's network</html>"


@pytest.fixture(autouse=True)
def _nothing_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    forget_aws(monkeypatch)


@pytest.fixture
def keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """Valid credentials."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "K")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Program:
    """Set the shell script that is the source of credentials."""
    return program_in(tmp_path, monkeypatch)


@asynccontextmanager
async def opened(server: ScriptedServer) -> AsyncIterator[RecordStore]:
    settings = StoreSettings(
        cas=CasChoice.TWO_PHASE,
        records_url="dynamodb://records",
        records_endpoint_url=server.endpoint,
    )
    records = open_records(real_runtime(), settings)
    try:
        yield records
    finally:
        await records.close()


def said(content: object, status: int = 200) -> Reply:
    return Reply(status, json.dumps(content).encode(), {"x-amzn-RequestId": "4711"})


def obliging(request: Request) -> Reply:
    """The table exists, and every other request succeeds."""
    if request.headers["x-amz-target"].endswith(".DescribeTable"):
        return said({"Table": {"TableStatus": "ACTIVE", "KeySchema": KEY_SCHEMA}})
    return said({})


async def test_a_renewal_that_fails(program: Program, caplog: pytest.LogCaptureFixture) -> None:
    """Old credentials are renewed before a request. When that fails, nothing is sent, and the error
    has no text of the program, which may hold secrets.
    """
    logging.getLogger("botocore").setLevel(logging.NOTSET)
    logging.getLogger("aiobotocore").setLevel(logging.NOTSET)
    caplog.set_level(logging.DEBUG)
    soon = datetime.now(UTC) + timedelta(minutes=5)  # botocore renews earlier than that
    program(saying({**STALE, "Expiration": soon.isoformat()}))
    async with scripted(obliging) as server, opened(server) as records:
        assert await records.insert(RECORD) == Inserted()
        before = len(server.requests), records.sent.total
        program(f"echo {SECRET} >&2; exit 1")
        for call in CALLS.values():
            with pytest.raises(StoreUnavailable, match="source of credentials"):
                await call(records)
        assert SECRET not in caplog.text
        assert "Signature=" not in caplog.text
        assert (len(server.requests), records.sent.total) == before


@pytest.mark.usefixtures("keys")
async def test_answers_of_another_server() -> None:
    """A success that is not from DynamoDB, such as a page for people, or is cut, says nothing about
    records: an insert may have been carried out, and reads fail.
    """
    async with scripted(obliging) as server, opened(server) as records:
        await records.ensure_schema()
        for reply in (
            Reply(200, HTML, {"Content-Type": "text/html"}),
            Reply(200),
            Reply(200, b"{}"),
            Reply(200, b"[1]"),
            Reply(404, b"[1]"),
            Reply(502, HTML),
        ):
            server.answer = lambda _, reply=reply: reply  # type: ignore[misc]
            for name, call in CALLS.items():
                if name == "insert":
                    outcome = await records.insert(RECORD)
                    assert isinstance(outcome, InsertUnknown)
                    assert f"answered {reply.status}" in outcome.cause
                else:
                    with pytest.raises(StoreUnavailable, match=f"answered {reply.status}"):
                        await call(records)
        cut = Reply(200, b"{", {"x-amzn-RequestId": "4711"}, said_bytes=99)
        server.answer = lambda _: cut
        assert isinstance(await records.insert(RECORD), InsertUnknown)
        with pytest.raises(StoreUnavailable):
            await records.find(RECORD.destination)


@pytest.mark.usefixtures("keys")
async def test_a_list_goes_on_behind_its_page() -> None:
    """Each page is requested with the key that ended the one before."""
    asked: list[object] = []
    key = {"database": {"S": "s3://bucket"}, "destination": {"S": "wal/1"}}
    item = {**key, "source": {"S": "wal/1.source"}, "committed": {"BOOL": False}}

    def paged(request: Request) -> Reply:
        asked.append(json.loads(request.body).get("ExclusiveStartKey"))
        return said({"Items": [item]} | ({"LastEvaluatedKey": key} if len(asked) == 1 else {}))

    async with scripted(obliging) as server, opened(server) as records:
        await records.ensure_schema()
        server.answer = paged
        assert await CALLS["list"](records) == [RECORD, RECORD]
    assert asked == [None, key]


@pytest.mark.usefixtures("keys")
async def test_another_server_at_the_beginning() -> None:
    """A table counts as existing or created only if DynamoDB has said so."""
    async with scripted(lambda _: Reply(200, HTML)) as server, opened(server) as records:
        with pytest.raises(StoreUnavailable, match=r"prepare records: .*not as DynamoDB does"):
            await records.insert(RECORD)
        assert len(server.requests) == 1
        server.answer = lambda _: Reply(403, HTML)
        with pytest.raises(StoreRefused, match="answered 403"):
            await records.insert(RECORD)


@pytest.mark.usefixtures("keys")
@pytest.mark.parametrize("status", [400, 500])
async def test_errors_are_redacted(status: int, caplog: pytest.LogCaptureFixture) -> None:
    """No error and no log shows the request's own headers that a server repeats."""
    logging.getLogger("botocore").setLevel(logging.NOTSET)
    caplog.set_level(logging.DEBUG)

    def gossip(request: Request) -> Reply:
        problem = f"no: {request.headers['authorization']} {SECRET}"
        return said({"__type": "x#InvalidSignatureException", "message": problem}, status)

    async with scripted(obliging) as server, opened(server) as records:
        await records.ensure_schema()
        server.answer = gossip
        texts = [await problem(records, call) for call in CALLS]
        signature = server.requests[-1].headers["authorization"].partition("Signature=")[2]
    for text in [*texts, caplog.text]:
        assert SECRET not in text
        assert signature not in text
        assert "Signature=" not in text
    assert "InvalidSignatureException: no: " in texts[1]


async def problem(records: RecordStore, call: str) -> str:
    try:
        outcome = await CALLS[call](records)
    except StoreError as error:
        return "".join(traceback.format_exception(error))
    assert isinstance(outcome, InsertUnknown), outcome
    return outcome.cause


@pytest.mark.usefixtures("keys")
async def test_connections_that_break() -> None:
    """After a connection that breaks behind the request the outcome is unknown; without a
    connection nothing was done.
    """

    def broken(_: Request) -> Reply:
        raise Broken

    async with scripted(obliging) as server, opened(server) as records:
        await records.ensure_schema()
        server.answer = broken
        assert isinstance(await records.insert(RECORD), InsertUnknown)
    server.endpoint = "http://127.0.0.1:1"
    async with opened(server) as records:
        with pytest.raises(StoreUnavailable, match="cannot connect"):
            await records.insert(RECORD)
