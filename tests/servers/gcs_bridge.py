"""Translates requests of Google's XML API into those of S3, and the replies back.

    x-goog-if-generation-match: 0    If-None-Match: *
    x-goog-meta-NAME                 x-amz-meta-NAME
    x-goog-copy-source               x-amz-copy-source; under a condition a GET, and a PUT with it
    DELETE of what isn't there       404, where S3 says 204

Generations other than 0 are not known here, and a request that names one is refused.
"""

from __future__ import annotations

import hashlib
from urllib.parse import parse_qsl, quote, unquote, urlencode

from tests.servers.messages import Header, Message
from tests.servers.s3 import S3Server
from tests.servers.serving import forwarded

CONDITION = "x-goog-if-generation-match"
COPY_SOURCE = "x-goog-copy-source"
OURS = "x-goog-meta-"
THEIRS = "x-amz-meta-"
DESCRIBING = frozenset({"content-type", "cache-control", "content-encoding", "content-language"})
PASSED_ON = DESCRIBING | {"content-disposition", "range", "if-match", "if-none-match"}


class Bridge:
    """Answers clients of Google's by one server of S3."""

    def __init__(self, server: S3Server) -> None:
        """`server` keeps the objects."""
        self._server = server

    async def reply(self, request: Message) -> Message:
        """What a client of Google's gets."""
        condition = request.header(CONDITION)
        if condition not in {None, "0"}:
            return Message("HTTP/1.1 400 Bad Request", [], b"generations are not known here")
        target = _target(request.target)
        headers = _headers(request)
        source = request.header(COPY_SOURCE)
        if source is not None and condition is not None:
            return await self._copied(source, target)
        if source is not None:
            headers["x-amz-copy-source"] = source
        if request.method == "DELETE":
            found = await self._ask("HEAD", target, {})
            if found.status == 404:
                return Message("HTTP/1.1 404 Not Found", [])
        reply = await self._ask(request.method, target, headers, request.body)
        reply.headers = [_ours(header) for header in reply.headers]
        return reply

    async def _copied(self, source: str, target: str) -> Message:
        """A copy to a name that must be free: the server takes conditions on PUT alone."""
        found = await self._ask("GET", _target(f"/{source.lstrip('/')}"), {})
        if found.status != 200:
            return found
        described = {
            key.lower(): value
            for key, value in found.headers
            if key.lower() in DESCRIBING or key.lower().startswith(THEIRS)
        }
        created = await self._ask("PUT", target, described | {"if-none-match": "*"}, found.body)
        if created.status == 200:
            tag = created.header("etag") or ""
            created.body = f"<CopyObjectResult><ETag>{tag}</ETag></CopyObjectResult>".encode()
        return created

    async def _ask(
        self, method: str, target: str, headers: dict[str, str], body: bytes = b""
    ) -> Message:
        """What the server replies to a request, which is signed here."""
        described = headers | {"x-amz-content-sha256": hashlib.sha256(body).hexdigest()}
        signed = self._server.sign(method, target, described)
        request = Message(f"{method} {target} HTTP/1.1", list(signed.items()), body)
        return await forwarded(request, self._server.endpoint)


def _target(target: str) -> str:
    """Path and query as S3 signs them."""
    path, _, query = target.partition("?")
    pairs = sorted(parse_qsl(query, keep_blank_values=True))
    asked = urlencode(pairs, quote_via=quote, safe="-_.~")
    return quote(unquote(path), safe="/-_.~") + (f"?{asked}" if asked else "")


def _headers(request: Message) -> dict[str, str]:
    """Those that the server should see, by the names that it knows."""
    named = {key.lower(): value for key, value in request.headers}
    kept = {key: value for key, value in named.items() if key in PASSED_ON}
    kept |= {
        THEIRS + key.removeprefix(OURS): value
        for key, value in named.items()
        if key.startswith(OURS)
    }
    return kept | ({"if-none-match": "*"} if CONDITION in named else {})


def _ours(header: Header) -> Header:
    name, value = header
    if name.lower().startswith(THEIRS):
        return OURS + name[len(THEIRS) :], value
    return header
