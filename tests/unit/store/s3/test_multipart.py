"""Uploads in parts: all or nothing, and no part is left behind."""

from __future__ import annotations

import asyncio
from random import Random

import pytest

from shalekv.errors import StoreRefused, StoreUnavailable
from shalekv.store.api import Created, Exists, Unknown
from shalekv.store.requests import RequestKind
from shalekv.store.s3 import multipart
from tests.kit.s3.opening import MIB, opened
from tests.kit.s3.scripted_server import Broken, Reply, refused, scripted
from tests.unit.store.s3.uploads import Uploads

DATA = Random(1).randbytes(22 * MIB + 1)  # 5 parts
SIZES = {"multipart_bytes": 5 * MIB, "multipart_part_bytes": 5 * MIB, "multipart_uploads_max": 2}
NAME = "levels/1.sst"


def broken() -> Reply:
    """No reply at all."""
    raise Broken


async def test_parts_make_the_object() -> None:
    """The parts are the object, no more at once than allowed, and completing is conditional."""
    uploads = Uploads(wanted=2)
    async with scripted(uploads.answer) as server, opened(server.endpoint, **SIZES) as s3:
        assert await s3.create(NAME, DATA, {"writer_epoch": "7"}) == Created()
        assert uploads.stored == DATA
        assert uploads.steps == ["begin", *5 * ["part"], "complete"]
        assert uploads.at_once_most == 2
        assert s3.sent.by_kind[RequestKind.WRITE] == s3.sent.total == 7
        begin, *_, complete = server.requests
        assert begin.headers["x-amz-meta-writer_epoch"] == "7"
        assert complete.headers["if-none-match"] == "*"
        assert b"<PartNumber>5</PartNumber>" in complete.body
        await s3.put(NAME, DATA)
        assert "if-none-match" not in server.requests[-1].headers


@pytest.mark.parametrize(
    ("name", "size_bytes"),
    [("wal/1.sst", len(DATA)), ("manifest/1.manifest", len(DATA)), (NAME, 5 * MIB)],
)
async def test_one_request(name: str, size_bytes: int) -> None:
    """WAL and manifest objects of any size, and SSTs that are not larger, are one request."""
    uploads = Uploads()
    async with scripted(uploads.answer) as server, opened(server.endpoint, **SIZES) as s3:
        assert await s3.create(name, DATA[:size_bytes]) == Created()
        assert uploads.steps == ["whole"]


@pytest.mark.parametrize(
    ("reply", "raised"),
    [
        (refused(500, "InternalError"), StoreUnavailable),
        (refused(503, "SlowDown"), StoreUnavailable),
        (refused(404, "NoSuchUpload"), StoreUnavailable),
        (refused(403, "ExpiredToken"), StoreRefused),
    ],
)
async def test_a_part_that_fails(reply: Reply, raised: type[Exception]) -> None:
    """When a part fails nothing was created, certainly, and the other parts are not kept."""
    uploads = Uploads(on_part=lambda number: reply if number == 3 else None)
    async with scripted(uploads.answer) as server, opened(server.endpoint, **SIZES) as s3:
        with pytest.raises(raised):
            await s3.create(NAME, DATA)
        assert uploads.stored is None
        assert uploads.steps[-1] == "abort"
        assert "complete" not in uploads.steps
        uploads.on_part = None
        assert await s3.create(NAME, DATA) == Created()


async def test_a_part_whose_connection_breaks() -> None:
    """A part that nobody answered is no doubt about the object: it was not completed."""
    uploads = Uploads(on_part=lambda number: broken() if number == 2 else None)
    async with scripted(uploads.answer) as server, opened(server.endpoint, **SIZES) as s3:
        with pytest.raises(StoreUnavailable):
            await s3.create(NAME, DATA)
        assert uploads.steps[-1] == "abort"


@pytest.mark.parametrize(
    "reply",
    [refused(500, "InternalError"), Reply(200, b"<html><body>Log in</body></html>")],
)
async def test_an_upload_that_does_not_begin(reply: Reply) -> None:
    """An upload whose beginning failed has created nothing, and there is nothing to abort."""
    uploads = Uploads(on_begin=lambda: reply)
    async with scripted(uploads.answer) as server, opened(server.endpoint, **SIZES) as s3:
        with pytest.raises(StoreUnavailable):
            await s3.create(NAME, DATA)
        assert uploads.steps == ["begin"]


async def test_a_rival_completes_first() -> None:
    """The condition is decided when the upload is completed, and the parts are thrown away."""
    uploads = Uploads(on_complete=lambda: refused(412, "PreconditionFailed"))
    async with scripted(uploads.answer) as server, opened(server.endpoint, **SIZES) as s3:
        assert await s3.create(NAME, DATA) == Exists()
        assert uploads.steps[-1] == "abort"


@pytest.mark.parametrize(
    "reply",
    [
        refused(500, "InternalError"),
        refused(409, "ConditionalRequestConflict"),
        refused(404, "NoSuchUpload"),
        Reply(200, refused(500, "InternalError").body),
        Reply(200, b""),
        Reply(200, b"<html><body>Log in</body></html>"),
        None,
    ],
)
async def test_completing_fails(reply: Reply | None) -> None:
    """Whatever comes of completing that is no plain answer leaves the outcome unknown."""
    uploads = Uploads(on_complete=lambda: reply or broken())
    async with scripted(uploads.answer) as server, opened(server.endpoint, **SIZES) as s3:
        assert isinstance(await s3.create(NAME, DATA), Unknown)
        assert uploads.steps[-2:] == ["complete", "abort"]
        assert s3.sent.total == len(server.requests)


async def test_an_abort_that_fails() -> None:
    """An upload that cannot be aborted changes nothing about why it failed."""
    uploads = Uploads(
        on_part=lambda _: refused(500, "InternalError"),
        on_abort=lambda: refused(403, "AccessDenied"),
    )
    async with scripted(uploads.answer) as server, opened(server.endpoint, **SIZES) as s3:
        with pytest.raises(StoreUnavailable, match="500 InternalError"):
            await s3.create(NAME, DATA)


async def test_an_abort_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """An abort that nobody answers holds its caller for a while only."""
    monkeypatch.setattr(multipart, "ABORT_S", 0.05)
    uploads = Uploads(on_complete=lambda: refused(412, "PreconditionFailed"))

    async def answer(request: object) -> Reply:
        if getattr(request, "method", "") == "DELETE":
            await asyncio.Event().wait()
        return await uploads.answer(request)  # type: ignore[arg-type]  # it is one

    async with scripted(answer) as server, opened(server.endpoint, **SIZES) as s3:
        assert await s3.create(NAME, DATA) == Exists()


async def test_cancellation() -> None:
    """An upload that is cancelled, once or again while it aborts, aborts and is cancelled."""
    uploads = Uploads(wanted=3)  # which never are
    aborting = asyncio.Event()
    go_on = asyncio.Event()

    async def answer(request: object) -> Reply:
        if getattr(request, "method", "") == "DELETE":
            aborting.set()
            await go_on.wait()
        return await uploads.answer(request)  # type: ignore[arg-type]  # it is one

    async with scripted(answer) as server, opened(server.endpoint, **SIZES) as s3:
        creating = asyncio.create_task(s3.create(NAME, DATA))
        await uploads.arrived.wait()
        creating.cancel()
        await aborting.wait()
        creating.cancel()
        await asyncio.sleep(0)
        assert not creating.done()
        go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await creating
        assert uploads.steps[-1] == "abort"
        assert "complete" not in uploads.steps
        assert uploads.stored is None
