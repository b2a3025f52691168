"""A proxy before a server that speaks S3, which does to requests and replies what a test asks for.

    async with proxy_before(s3) as proxy:
        ... proxy.server is `s3` by way of the proxy ...
        proxy.lose_reply(r"^PUT /bucket/manifest/")
        proxy.answer(SLOW_DOWN, times=2, when=r"^GET ")

`when` is searched for in "METHOD /path?query", decoded. A rule that counts is spent after `times`
requests; `heal` ends all of them. The Host of the client is passed on, so that signatures hold.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from urllib.parse import unquote

from tests.servers.messages import Message, forwarded, serving
from tests.servers.s3 import S3Server


@dataclass(frozen=True, slots=True)
class Answer:
    """The reply of the proxy in the place of the server."""

    status: int
    code: str
    message: str = "said by the proxy of a test"

    def reply(self, method: str) -> Message:
        body = (
            '<?xml version="1.0" encoding="UTF-8"?>\n'
            f"<Error><Code>{self.code}</Code><Message>{self.message}</Message></Error>"
        )
        headers = [("Content-Type", "application/xml")]
        content = b"" if method == "HEAD" else body.encode()
        return Message(f"HTTP/1.1 {self.status} {self.code}", headers, content)


SLOW_DOWN = Answer(503, "SlowDown")
INTERNAL_ERROR = Answer(500, "InternalError")
ACCESS_DENIED = Answer(403, "AccessDenied")


@dataclass(slots=True, eq=False)
class Rule:
    """Fault of the requests that match, and how many of them are left."""

    when: re.Pattern[str]
    times: int | None  # None: until healed
    answer: Answer | None = None
    delay_s: float = 0.0
    loses_reply: bool = False
    spent: int = 0  # requests that it has met

    def take(self, request: str) -> bool:
        """Return whether it applies to this request; a fault that counts is then spent by one."""
        if not self.when.search(request) or self.spent == self.times:
            return False
        self.spent += 1
        return True


@dataclass(slots=True)
class Proxy:
    """Forwards requests to one server, by the rules of a test."""

    server: S3Server  # through the proxy
    target: str  # the URL of the server itself
    seen: list[str] = field(default_factory=list)  # "METHOD /path?query", in the order of arrival
    rules: list[Rule] = field(default_factory=list)
    healed: asyncio.Event = field(default_factory=asyncio.Event)

    def answer(self, answer: Answer, *, when: str = "", times: int | None = None) -> Rule:
        """The server does not see these requests at all."""
        return self._add(Rule(re.compile(when), times, answer=answer))

    def delay(self, delay_s: float, *, when: str = "", times: int | None = None) -> Rule:
        """These requests reach the server later, or when all is healed."""
        return self._add(Rule(re.compile(when), times, delay_s=delay_s))

    def lose_reply(self, when: str = "^PUT ", *, times: int | None = 1) -> Rule:
        """The server has done it; the client sees its connection closed. Failures don't count."""
        return self._add(Rule(re.compile(when), times, loses_reply=True))

    def heal(self) -> None:
        """From now on all is passed on as it is."""
        self.rules.clear()
        self.healed.set()
        self.healed = asyncio.Event()

    async def reply(self, request: Message) -> Message | None:
        name = f"{request.method} {unquote(request.target)}"
        self.seen.append(name)
        for rule in [rule for rule in self.rules if not rule.loses_reply]:
            if not rule.take(name):
                continue
            if rule.answer is not None:
                return rule.answer.reply(request.method)
            if rule.delay_s:
                with suppress(TimeoutError):
                    await asyncio.wait_for(self.healed.wait(), rule.delay_s)
        reply = await forwarded(request, self.target)
        losing = [rule for rule in self.rules if rule.loses_reply]
        if reply.status < 300 and any(rule.take(name) for rule in losing):
            return None
        return reply

    def _add(self, rule: Rule) -> Rule:
        self.rules.append(rule)
        return rule


@asynccontextmanager
async def proxy_before(server: S3Server, port: int = 0) -> AsyncIterator[Proxy]:
    """Run a proxy before `server`, which changes nothing without rules.

    It is on a free port, or on `port`, such as that of a proxy which has ended.
    """
    proxy = Proxy(server, server.endpoint)
    async with serving(proxy.reply, port) as endpoint:
        proxy.server = replace(server, endpoint=endpoint)
        try:
            yield proxy
        finally:
            proxy.heal()
