"""Uploads in parts create the object or nothing, and leave no part behind.

The collector, and no other process, aborts abandoned uploads.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from random import Random
from urllib.parse import parse_qs, urlsplit

import pytest

from shalekv.errors import StoreRefused, StoreUnavailable
from shalekv.store.api import Created, Exists, Repaired, RequestKind, Unknown
from shalekv.store.s3 import uploads as multipart
from tests.kit.constants import set_constants
from tests.kit.s3.opening import FOLDER, MIB, opened
from tests.kit.s3.scripted_server import Broken, Reply, Request, refused, scripted, stored

DATA = Random(1).randbytes(21 * MIB)  # 5 parts
SIZES = {"multipart_bytes": 5 * MIB}
NAME = "levels/1.sst"


@pytest.fixture(autouse=True)
def _small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    module = "shalekv.store.s3.store"
    set_constants(monkeypatch, {f"{module}:PART_BYTES": 5 * MIB, f"{module}:PART_UPLOADS_MAX": 2})


@dataclass
class Uploads:
    """Answers requests; each step can be made to answer otherwise."""

    parts: dict[int, bytes] = field(default_factory=dict)
    steps: list[str] = field(default_factory=list)
    on_begin: Callable[[], Reply] | None = None
    on_part: Callable[[int], Reply | None] | None = None
    on_complete: Callable[[], Reply] | None = None
    on_abort: Callable[[], Reply] | None = None
    stored: bytes | None = None
    arrived: asyncio.Event = field(default_factory=asyncio.Event)  # a part did
    wanted: int = 0  # so many parts must have arrived before any is answered
    enough: asyncio.Event = field(default_factory=asyncio.Event)
    at_once: int = 0
    at_once_most: int = 0

    async def answer(self, request: Request) -> Reply:
        query = parse_qs(urlsplit(request.target).query, keep_blank_values=True)
        if request.method == "POST" and "uploads" in query:
            return self._begin()
        if request.method == "PUT" and "partNumber" in query:
            return await self._part(int(query["partNumber"][0]), request.body)
        if request.method == "POST":
            return self._complete()
        if request.method == "DELETE":
            self.steps.append("abort")
            return self.on_abort() if self.on_abort else Reply(204)
        self.steps.append("whole")
        self.stored = request.body
        return stored()

    def _begin(self) -> Reply:
        self.steps.append("begin")
        if self.on_begin:
            return self.on_begin()
        id_xml = "<UploadId>upload-1</UploadId>"
        return Reply(200, f"<R>{id_xml}</R>".encode())

    async def _part(self, number: int, body: bytes) -> Reply:
        self.steps.append("part")
        self.at_once += 1
        self.at_once_most = max(self.at_once_most, self.at_once)
        try:
            self.arrived.set()
            if self.at_once >= self.wanted:
                self.enough.set()
            await self.enough.wait()
            reply = self.on_part(number) if self.on_part else None
            if reply is not None:
                return reply
            self.parts[number] = body
            return Reply(200, b"", {"ETag": f'"etag-{number}"'})
        finally:
            self.at_once -= 1

    def _complete(self) -> Reply:
        self.steps.append("complete")
        if self.on_complete:
            return self.on_complete()
        self.stored = b"".join(body for _, body in sorted(self.parts.items()))
        return Reply(200, b"<R><ETag>x</ETag></R>")


def broken() -> Reply:
    raise Broken


async def test_parts_make_the_object() -> None:
    """The parts make up the object, no more are sent at once than allowed, and completing is
    conditional.
    """
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
    """WAL and manifest objects of any size, and SSTs up to the limit, are one request."""
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
        (None, StoreUnavailable),  # the connection breaks
    ],
)
async def test_a_part_that_fails(reply: Reply | None, raised: type[Exception]) -> None:
    """When a part fails, nothing was created for certain, and the other parts are not kept."""
    uploads = Uploads(on_part=lambda number: (reply or broken()) if number == 3 else None)
    async with scripted(uploads.answer) as server, opened(server.endpoint, **SIZES) as s3:
        uploads.on_abort = lambda: refused(403, "AccessDenied")  # which changes nothing
        with pytest.raises(raised):
            await s3.create(NAME, DATA)
        assert uploads.stored is None
        assert uploads.steps[-1] == "abort"
        assert "complete" not in uploads.steps
        uploads.on_part = None
        assert await s3.create(NAME, DATA) == Created()


@pytest.mark.parametrize(
    "reply",
    [refused(500, "InternalError"), Reply(200, b"<html><body>Log in</body></html>")],
)
async def test_an_upload_that_does_not_begin(reply: Reply) -> None:
    """An upload that fails to begin has created nothing, and there is nothing to abort."""
    uploads = Uploads(on_begin=lambda: reply)
    async with scripted(uploads.answer) as server, opened(server.endpoint, **SIZES) as s3:
        with pytest.raises(StoreUnavailable):
            await s3.create(NAME, DATA)
        assert uploads.steps == ["begin"]


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
    """After any unclear answer to the completion the outcome is unknown."""
    uploads = Uploads(on_complete=lambda: reply or broken())
    async with scripted(uploads.answer) as server, opened(server.endpoint, **SIZES) as s3:
        assert isinstance(await s3.create(NAME, DATA), Unknown)
        assert uploads.steps[-2:] == ["complete", "abort"]
        assert s3.sent.total == len(server.requests)


@pytest.mark.parametrize("is_answered", [True, False])
async def test_a_rival_completes_first(
    monkeypatch: pytest.MonkeyPatch, *, is_answered: bool
) -> None:
    """The condition is decided when the upload is completed, and the parts of the loser are
    dropped. An abort without an answer delays its caller only for a while.
    """
    uploads = Uploads(on_complete=lambda: refused(412, "PreconditionFailed"))

    async def answer(request: Request) -> Reply:
        reply = await uploads.answer(request)
        if request.method == "DELETE" and not is_answered:
            await asyncio.Event().wait()
        return reply

    if not is_answered:
        monkeypatch.setattr(multipart, "ABORT_S", 0.05)
    async with scripted(answer) as server, opened(server.endpoint, **SIZES) as s3:
        assert await s3.create(NAME, DATA) == Exists()
        assert uploads.steps[-1] == "abort"


async def test_cancellation() -> None:
    """An upload that is cancelled, also again during its abort, is aborted and ends as
    cancelled.
    """
    uploads = Uploads(wanted=3)  # which never are
    aborting = asyncio.Event()
    go_on = asyncio.Event()

    async def answer(request: Request) -> Reply:
        if request.method == "DELETE":
            aborting.set()
            await go_on.wait()
        return await uploads.answer(request)

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


UPLOAD = "<Upload><Key>{0}</Key><UploadId>id</UploadId><Initiated>{1}</Initiated></Upload>"
PAGE = (
    "<ListMultipartUploadsResult xmlns='http://s3.amazonaws.com/doc/2006-03-01/'>"
    "<IsTruncated>{more}</IsTruncated><NextKeyMarker>{key}</NextKeyMarker>"
    "<NextUploadIdMarker>id</NextUploadIdMarker>{upload}</ListMultipartUploadsResult>"
)


def no_name_is_collected(_name: str) -> bool:
    return False


class Abandoned:
    """A server with uploads that were begun some hours ago: key -> hours."""

    def __init__(self, begun: dict[str, float]) -> None:
        self.begun = begun
        self.aborted: list[str] = []

    def answer(self, request: Request) -> Reply:
        """A list shows one upload a page; the time is that of this machine."""
        if request.method == "DELETE":
            self.aborted.append(request.target.partition("?")[0].partition("/bucket/")[2])
            return Reply(204)
        if "uploads" not in request.target:
            return refused(404, "NoSuchKey")
        marker = parse_qs(urlsplit(request.target).query).get("key-marker", [""])[0]
        key = min(key for key in self.begun if key > marker)
        begun = datetime.now(UTC) - timedelta(hours=self.begun[key])
        upload = UPLOAD.format(key, f"{begun:%Y-%m-%dT%H:%M:%S.000Z}")
        more = str(key != max(self.begun)).lower()
        return Reply(200, PAGE.format(more=more, key=key, upload=upload).encode())


async def test_old_uploads_go_and_others_stay() -> None:
    """Uploads older than a day are aborted, page by page; younger ones and those of other folders
    stay.
    """
    uploads = Abandoned(
        {
            f"{FOLDER}/levels/a": 25,
            f"{FOLDER}/levels/b": 23,
            f"{FOLDER}/levels/c": 99,
            "other/d": 99,
        }
    )
    async with scripted(uploads.answer) as server, opened(server.endpoint) as s3:
        assert await s3.repair(no_name_is_collected) == Repaired(aborted=2)
        assert uploads.aborted == [f"{FOLDER}/levels/a", f"{FOLDER}/levels/c"]
        assert s3.sent.by_kind[RequestKind.LIST] == 4


async def test_abandoned_uploads_are_listed_seldom() -> None:
    """A collector that runs every minute lists uploads once an hour; opening a database
    never does.
    """
    uploads = Abandoned({f"{FOLDER}/levels/a": 25})
    async with scripted(uploads.answer) as server, opened(server.endpoint) as s3:
        assert await s3.repair() == Repaired()
        assert s3.sent.total == 0
        await s3.repair(no_name_is_collected)
        sent = s3.sent.total
        assert await s3.repair(no_name_is_collected) == Repaired()
        assert s3.sent.total == sent


@pytest.mark.parametrize("code", ["AccessDenied", "NotImplemented"])
async def test_a_refusal_is_no_reason_not_to_collect(code: str) -> None:
    """Parts that stay cost only money, so a refusal does not stop a collection."""

    def answer(request: Request) -> Reply:
        if "uploads" in request.target:
            return refused(403 if code == "AccessDenied" else 501, code)
        return refused(404, "NoSuchKey")

    async with scripted(answer) as server, opened(server.endpoint) as s3:
        assert await s3.repair(no_name_is_collected) == Repaired()
