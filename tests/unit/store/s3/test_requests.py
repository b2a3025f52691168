"""The requests that each call sends, the counts that they are added to, and the store's clock.

A time in one reply that is far ahead is not accepted at once.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import re
from email.utils import formatdate

import pytest

from shalekv.errors import StoreRefused, StoreUnavailable
from shalekv.settings import StoreSettings
from shalekv.store.api import Created, Repaired, RequestKind
from shalekv.store.cas import CasStore
from shalekv.store.s3.client import CLOCK_LEAP_MS, StoreClock, _be_consistent
from shalekv.store.s3.store import S3Store
from shalekv.store.url import BucketUrl, Provider
from tests.kit.inline_runtime import InlineClock, inline_runtime
from tests.kit.s3.opening import BUCKET, opened
from tests.kit.s3.scripted_server import Reply, Request, found, refused, scripted

WHEN = "2028-01-01T00:00:00.123Z"
NOON_MS = 1_830_297_600_000
HOUR_MS = 3_600_000


def page(keys: list[str], *, token: str = "") -> Reply:
    """One page of a list; more follow if there is a token."""
    objects = "".join(
        f"<Contents><Key>{key}</Key><LastModified>{WHEN}</LastModified><Size>3</Size></Contents>"
        for key in keys
    )
    more = f"<IsTruncated>true</IsTruncated><NextContinuationToken>{token}</NextContinuationToken>"
    end = more if token else "<IsTruncated>false</IsTruncated>"
    xml = f"<ListBucketResult>{objects}{end}</ListBucketResult>"
    return Reply(200, xml.encode())


def obliging(request: Request) -> Reply:
    if request.method == "GET":
        return found(b"x")
    copied = b"<R><ETag>e</ETag></R>" if "x-amz-copy-source" in request.headers else b""
    return Reply(200, copied, found(b"").headers)


async def test_every_kind_is_counted() -> None:
    """Each call counts its requests by the kind that is charged; a create is one request."""
    async with scripted(obliging) as server, opened(server.endpoint) as s3:
        assert await s3.create("wal/1.sst", b"x", {"writer_epoch": "7"}) == Created()
        (request,) = server.requests
        assert request.target == "/bucket/folder/wal/1.sst"
        assert request.headers["x-amz-meta-writer_epoch"] == "7"
        await s3.put("wal/1", b"x")
        await s3.copy("wal/1", "wal/2")
        await s3.get("wal/1")
        await s3.get_range("wal/1", 0, 1)
        await s3.head("wal/1")
        await s3.now_ms()
        await s3.delete(["wal/1", "wal/2"])
        await s3.delete([])
        assert await s3.repair() == Repaired()
        assert [request.method for request in server.requests] == (
            "PUT PUT PUT GET GET HEAD GET POST".split()
        )
        counted = {kind: n for kind, n in s3.sent.by_kind.items() if n}
        assert counted == {RequestKind.WRITE: 3, RequestKind.READ: 4, RequestKind.DELETE: 1}
        # No headers or trailers of checksums that other servers do not know.
        names = {name for request in server.requests for name in request.headers}
        assert not [name for name in names if "checksum" in name or "trailer" in name]
        assert "x-amz-content-sha256" in names


async def test_counts_belong_to_their_store() -> None:
    """Stores that share a client have their own counts, also when they send at once."""
    async with scripted(lambda _: found(b"x")) as server:
        async with opened(server.endpoint) as one, opened(server.endpoint) as other:
            await asyncio.gather(
                *(one.get("wal/1") for _ in range(7)), *(other.head("wal/1") for _ in range(5))
            )
            assert (one.sent.total, other.sent.total) == (7, 5)
        assert len(server.requests) == 12


async def test_lists_are_counted_by_pages() -> None:
    """A list continues by the token of the page before, with one request for each page."""
    pages = [
        page(["folder/wal/1", "folder/wal/2"], token="a+b/c="),
        page([], token="next"),
        page(["folder/wal/3"]),
    ]
    async with scripted(lambda _: pages.pop(0)) as server, opened(server.endpoint) as s3:
        infos = [info async for info in s3.list("wal/", start_after="wal/0")]
        assert [info.name for info in infos] == ["wal/1", "wal/2", "wal/3"]
        assert {info.size_bytes for info in infos} == {3}
        assert s3.sent.by_kind[RequestKind.LIST] == s3.sent.total == 3
        first, second, third = (request.target for request in server.requests)
        assert (
            "list-type=2&prefix=folder%2Fwal%2F&max-keys=1000&start-after=folder%2Fwal%2F0" in first
        )
        assert "continuation-token=a%2Bb%2Fc%3D" in second
        assert "start-after" not in second
        assert "continuation-token=next" in third


async def test_a_list_that_stops_in_the_middle() -> None:
    """A page that says that more follows, and not where, does not end the list: it is an error."""
    cut = Reply(200, b"<R><IsTruncated>true</IsTruncated></R>")
    async with scripted(lambda _: cut) as server, opened(server.endpoint) as s3:
        with pytest.raises(StoreUnavailable, match="not where"):
            await anext(s3.list("wal/"))


async def test_names_that_are_none_are_not_listed() -> None:
    """A folder object of a web console is not listed, since its name could not be deleted.
    Milliseconds, which some servers report only in lists, are dropped.
    """
    answer = page(["folder/wal/", "folder/wal/1", "folder/wal//2", "folder/wal/a/", "folder/wal/b"])
    async with scripted(lambda _: answer) as server, opened(server.endpoint) as s3:
        found = [(info.name, info.modified_ms) async for info in s3.list("wal/")]
        assert found == [("wal/1", 1_830_297_600_000), ("wal/b", 1_830_297_600_000)]


async def test_deletions_go_in_batches() -> None:
    """One request deletes at most 1,000 names, each once, with the MD5 that servers require."""
    async with scripted(lambda _: Reply(200, b"<DeleteResult/>")) as server:
        async with opened(server.endpoint) as s3:
            names = [f"wal/{number:04d}" for number in range(2_500)]
            await s3.delete([*names, *names])
            assert s3.sent.by_kind[RequestKind.DELETE] == s3.sent.total == 3
        sizes = []
        for request in server.requests:
            digest = hashlib.md5(request.body, usedforsecurity=False).digest()
            assert request.headers["content-md5"] == base64.b64encode(digest).decode()
            assert b"<Quiet>true</Quiet>" in request.body
            sizes.append(len(re.findall(b"<Key>folder/wal/[0-9]{4}</Key>", request.body)))
        assert sizes == [1_000, 1_000, 500]


@pytest.mark.parametrize(
    ("codes", "raised"),
    [
        (["InternalError"], StoreUnavailable),
        (["SlowDown", "AccessDenied"], StoreRefused),
        (["NoSuchKey"], None),
    ],
)
async def test_deletions_that_fail_alone(codes: list[str], raised: type[Exception] | None) -> None:
    """One object that is not deleted makes the call fail, though the reply is a success."""
    entries = "".join(
        f"<Error><Key>folder/wal/{number}</Key><Code>{code}</Code></Error>"
        for number, code in enumerate(codes)
    )
    answer = Reply(200, f"<DeleteResult>{entries}</DeleteResult>".encode())
    async with scripted(lambda _: answer) as server, opened(server.endpoint) as s3:
        if raised is None:
            await s3.delete(["wal/0", "wal/1"])
            return
        with pytest.raises(raised, match=f"delete wal/{len(codes) - 1}: .*{codes[-1][:3]}|need"):
            await s3.delete(["wal/0", "wal/1"])


@pytest.mark.parametrize(
    ("offset", "length", "wanted", "expected"),
    [(2, 3, "bytes=2-4", b"234"), (-4, 2, "bytes=-4", b"67"), (-4, 99, "bytes=-4", b"6789")],
)
async def test_ranges(offset: int, length: int, wanted: str, expected: bytes) -> None:
    """A range is requested as in HTTP; if the server sends the whole object, it is cut out."""

    def ranged(request: Request) -> Reply:
        whole = found(b"0123456789")
        asked = re.fullmatch(r"bytes=(\d*)-(\d*)", request.headers["range"])
        assert asked is not None
        first = int(asked[1]) if asked[1] else 10 - int(asked[2])
        part = whole.body[first : int(asked[2]) + 1 if asked[1] else None]
        headers = {**whole.headers, "Content-Range": f"bytes {first}-{first + len(part) - 1}/10"}
        return Reply(206, part, headers)

    async with scripted(ranged) as server, opened(server.endpoint) as s3:
        assert await s3.get_range("levels/1", offset, length) == expected
        assert server.requests[0].headers["range"] == wanted
        server.answer = lambda _: found(b"0123456789")
        assert await s3.get_range("levels/1", offset, length) == expected
        server.answer = lambda _: refused(416, "InvalidRange")
        assert await s3.get_range("levels/1", offset, length) == b""


@pytest.mark.parametrize(
    ("url", "is_asked"),
    [
        ("https://t3.storage.dev/bucket", True),
        ("https://bucket.fly.storage.tigris.dev/key", True),
        ("https://bucket.s3.amazonaws.com/key", False),
        ("http://127.0.0.1:9000/bucket/storage.dev", False),
    ],
)
def test_tigris_is_asked_to_be_consistent(url: str, is_asked: bool) -> None:  # noqa: FBT001
    """Only requests to Tigris have the header without which it may answer from an old copy."""
    params: dict[str, object] = {"url": url, "headers": {}}
    _be_consistent(params=params)
    assert params["headers"] == ({"X-Tigris-Consistent": "true"} if is_asked else {})


class DatedReplies:
    """Answers with the Dates that a test sets."""

    def __init__(self, *store_ms: int) -> None:
        self.store_ms = list(store_ms)

    def answer(self, _: Request) -> Reply:
        date = formatdate(self.store_ms.pop(0) / 1_000, usegmt=True)
        return Reply(404, refused(404, "NoSuchKey").body, {"Date": date})


@pytest.mark.parametrize(
    "readings",
    [
        # (reported time after noon, time of the reply, whether it is accepted)
        [(0, 0, True)],  # the first: there is nothing to compare it with
        # A single leap has no effect when the next reading agrees with those before it.
        [(0, 0, True), (HOUR_MS, 1_000, False), (1_000, 1_000, True), (HOUR_MS, 3_000, False)],
        # Two leaps that disagree do not confirm each other.
        [(0, 0, True), (3 * HOUR_MS, 1, False), (HOUR_MS, 2, False), (3 * HOUR_MS, 3, False)],
        # After the store's clock was set, or this machine was suspended, one request fails.
        [(0, 0, True), (HOUR_MS, 1, False), (HOUR_MS + 1_000, 1_000, True)],
        # Time that has passed here has passed for the store; a small difference is accepted.
        [(0, 0, True), (9 * HOUR_MS + CLOCK_LEAP_MS, 9 * HOUR_MS, True)],
        [(0, 0, True), (9 * HOUR_MS + CLOCK_LEAP_MS + 1_000, 9 * HOUR_MS, False)],
    ],
)
def test_what_is_believed(readings: list[tuple[int, int, bool]]) -> None:
    """A leap is accepted when a second reply confirms it."""
    clock = StoreClock()
    for store_ms, at_ms, is_believed in readings:
        expected = NOON_MS + store_ms if is_believed else None
        assert clock.observe(NOON_MS + store_ms, float(at_ms)) == expected


async def test_a_reply_that_is_far_ahead() -> None:
    """The call fails with a transient error, and stores that share a client share the readings.
    When replies go back, the clock stays where it was.
    """
    reported = DatedReplies(NOON_MS, NOON_MS + HOUR_MS, NOON_MS + 5_000, NOON_MS + 3_000)
    async with scripted(reported.answer) as server, opened(server.endpoint) as s3:
        assert await s3.now_ms() == NOON_MS
        async with opened(server.endpoint) as other:
            with pytest.raises(StoreUnavailable, match="far ahead"):
                await other.now_ms()
            assert await s3.now_ms() == NOON_MS + 5_000
            assert await other.now_ms() == NOON_MS + 5_000
        never = Reply(404, refused(404, "NoSuchKey").body, {"Date": "soon"})
        server.answer = lambda _: never
        with pytest.raises(StoreRefused, match="no Date"):
            await s3.now_ms()


async def test_the_time_is_requested_again() -> None:
    """A store with retries gets the time in the end; local time is that of the runtime."""
    clock = InlineClock()
    runtime = inline_runtime(clock=clock)
    reported = DatedReplies(NOON_MS, NOON_MS + HOUR_MS, NOON_MS + 1_000, NOON_MS + HOUR_MS + 1_000)
    async with scripted(reported.answer) as server:
        place = BucketUrl(Provider.S3, BUCKET, "")
        s3 = S3Store(place, runtime, StoreSettings(endpoint_url=server.endpoint))
        store = CasStore(s3, runtime, StoreSettings())
        assert await store.now_ms() == NOON_MS
        assert await store.now_ms() == NOON_MS + 1_000
        assert len(server.requests) == 3
        await clock.sleep_ms(HOUR_MS)
        assert await store.now_ms() == NOON_MS + HOUR_MS + 1_000
        assert len(server.requests) == 4
        await s3.close()
