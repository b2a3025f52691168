"""A bucket that takes uploads in parts, as much of it as tests of its failures need."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from urllib.parse import parse_qs, urlsplit

from tests.kit.s3.scripted_server import Reply, Request, stored

UPLOAD_ID = "upload-1"


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
    wanted: int = 0  # so many parts have to be there at once before any is answered
    enough: asyncio.Event = field(default_factory=asyncio.Event)
    at_once: int = 0
    at_once_most: int = 0

    async def answer(self, request: Request) -> Reply:
        """As S3 does."""
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
        id_xml = f"<UploadId>{UPLOAD_ID}</UploadId>"
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
