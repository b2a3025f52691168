"""The proxy passes on what it is not told to change, and does what it is told."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Iterator
from http.client import RemoteDisconnected
from urllib.error import HTTPError
from urllib.parse import urlsplit

import pytest

from tests.servers.proxy import ACCESS_DENIED, SLOW_DOWN, Proxy, proxy_before
from tests.servers.s3 import S3Server
from tests.servers.versitygw import versitygw

pytestmark = pytest.mark.timeout(900)  # the first test may have to install the server


@pytest.fixture(scope="module")
def s3() -> Iterator[S3Server]:
    """A server that checks signatures, with a bucket."""
    with versitygw() as server:
        server.create_bucket("bucket")
        yield server


@pytest.fixture
async def proxy(s3: S3Server) -> AsyncIterator[Proxy]:
    """Before that server."""
    async with proxy_before(s3) as started:
        yield started


async def test_passes_on(proxy: Proxy) -> None:
    """Requests are signed for the address of the proxy, and the server takes them."""
    await put(proxy.server, "plain", b"content")
    assert await get(proxy.server, "plain") == b"content"
    assert proxy.seen == ["PUT /bucket/plain", "GET /bucket/plain"]


async def test_drops_header(s3: S3Server, proxy: Proxy) -> None:
    """Without If-None-Match the server overwrites, though the header was signed."""
    await put(s3, "dropped", b"old")
    with pytest.raises(HTTPError, match="412"):
        await put(proxy.server, "dropped", b"new", **{"if-none-match": "*"})
    proxy.drop_header("If-None-Match")
    await put(proxy.server, "dropped", b"new", **{"if-none-match": "*"})
    assert await get(s3, "dropped") == b"new"


async def test_loses_reply(s3: S3Server, proxy: Proxy) -> None:
    """The client knows nothing, and the server has the object; the next reply arrives."""
    proxy.lose_reply("^PUT .*/lost")
    with pytest.raises(RemoteDisconnected):
        await put(proxy.server, "lost", b"content")
    assert await get(s3, "lost") == b"content"
    await put(proxy.server, "lost", b"again")


async def test_answers(s3: S3Server, proxy: Proxy) -> None:
    """What it answers itself never reaches the server, and it stops when the rule is spent."""
    rule = proxy.answer(SLOW_DOWN, when="^PUT .*/answered", times=2)
    for _ in range(2):
        with pytest.raises(HTTPError, match="503"):
            await put(proxy.server, "answered", b"content")
    with pytest.raises(HTTPError, match="404"):
        await get(s3, "answered")
    await put(proxy.server, "answered", b"content")
    assert rule.spent == 2
    proxy.answer(ACCESS_DENIED)
    with pytest.raises(HTTPError, match="403"):
        await get(proxy.server, "answered")
    proxy.heal()
    assert await get(proxy.server, "answered") == b"content"


async def test_delays(proxy: Proxy) -> None:
    """A delayed request waits, and goes on when all is healed."""
    proxy.delay(60, when="^PUT ")
    async with asyncio.TaskGroup() as tasks:
        late = tasks.create_task(put(proxy.server, "late", b"content"))
        done, _ = await asyncio.wait({late}, timeout=0.2)
        assert not done
        proxy.heal()


async def test_reverses_lists_and_hides_metadata(s3: S3Server, proxy: Proxy) -> None:
    """Lists come in the wrong order, and objects without what their writer noted."""
    for name in ("list/1", "list/2", "list/3"):
        await put(s3, name, b"", **{"x-amz-meta-note": "n"})
    target = "/bucket?list-type=2&prefix=list%2F"
    assert await names(proxy.server, target) == [b"list/1", b"list/2", b"list/3"]
    proxy.lists_reversed = proxy.metadata_hidden = True
    assert await names(proxy.server, target) == [b"list/3", b"list/2", b"list/1"]
    assert b"x-amz-meta-note: n" in await raw_get(s3, "list/1")
    assert b"x-amz-meta-note" not in await raw_get(proxy.server, "list/1")


async def put(server: S3Server, name: str, body: bytes, **headers: str) -> None:
    """Write an object, in a thread."""
    await asyncio.to_thread(server.request, "PUT", f"/bucket/{name}", body, headers)


async def get(server: S3Server, name: str) -> bytes:
    """Read an object, in a thread."""
    return await asyncio.to_thread(server.request, "GET", f"/bucket/{name}")


async def names(server: S3Server, target: str) -> list[bytes]:
    """The names of a list as they come."""
    listed = await asyncio.to_thread(server.request, "GET", target)
    return re.findall(rb"<Key>(.*?)</Key>", listed)


async def raw_get(server: S3Server, name: str) -> bytes:
    """The reply to a GET as it comes, with its headers in lower case."""
    target = f"/bucket/{name}"
    headers = server.sign("GET", target, {"x-amz-content-sha256": "UNSIGNED-PAYLOAD"})
    host, _, port = urlsplit(server.endpoint).netloc.rpartition(":")
    far, forth = await asyncio.open_connection(host, int(port))
    lines = [f"GET {target} HTTP/1.1", *(f"{key}: {value}" for key, value in headers.items())]
    forth.write("\r\n".join([*lines, "connection: close", "", ""]).encode())
    reply = (await far.readuntil(b"\r\n\r\n")).lower()
    forth.close()
    return reply
