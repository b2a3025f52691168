r"""Standard output as the line to the parent process: what a child has sent to the object store.

    {"sent":{"write":12,"list":3, ...}}\n      numbers since the child has begun, which only grow

A line is told every `REPORT_INTERVAL_MS` in which something has changed, and at the end. A parent
that does not read loses lines, never counts: the next line has them.
"""

from __future__ import annotations

import asyncio
import os
import stat
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Annotated

import structlog
from pydantic import BaseModel, ConfigDict, Field

from shalekv.clock import Clock
from shalekv.roles.store_use import ProcessUse
from shalekv.store.requests import RequestCounts, RequestKind

REPORT_INTERVAL_MS = 2_000
LINE_BYTES_MAX = 1_024  # well below what a pipe takes whole
REQUESTS_MAX = 2**53  # sums of them stay within 64 bits

_STANDARD_OUTPUT = 1

_log = structlog.get_logger(__name__)

Sent = Mapping[RequestKind, int]


class _Report(BaseModel):
    model_config = ConfigDict(frozen=True, strict=True)

    sent: dict[str, Annotated[int, Field(ge=0, le=REQUESTS_MAX)]]


def report_line(sent: Sent) -> bytes:
    """The line that tells so."""
    told = _Report(sent={kind.value: requests for kind, requests in sent.items()})
    return told.model_dump_json().encode() + b"\n"


def parse_report(line: bytes) -> Sent:
    """What a line tells; kinds that this version does not know are left out.

    Raises ValueError when it is no such line.
    """
    sent = _Report.model_validate_json(line).sent
    return {kind: sent[kind] for kind in RequestKind if kind in sent}


def total_of(counts: Sequence[RequestCounts]) -> dict[RequestKind, int]:
    """What several stores of one process have sent together."""
    return {kind: sum(each.by_kind[kind] for each in counts) for kind in RequestKind}


@contextmanager
def telling_parent(counts: Sequence[RequestCounts]) -> Iterator[None]:
    """Tell what `counts` come to; nothing where standard output leads to no process."""
    if not _leads_to_a_process():
        yield
        return
    # A parent that does not read must not hold up its child.
    os.set_blocking(_STANDARD_OUTPUT, False)
    loop = asyncio.get_running_loop()
    last = dict.fromkeys(RequestKind, 0)
    timer: asyncio.TimerHandle | None = None

    def tell() -> None:
        nonlocal last
        now = total_of(counts)
        if now != last and _write(report_line(now)):
            last = now

    def tell_again_and_again() -> None:
        nonlocal timer
        tell()
        timer = loop.call_later(REPORT_INTERVAL_MS / 1_000, tell_again_and_again)

    tell_again_and_again()
    try:
        yield
    finally:
        if timer is not None:
            timer.cancel()
        tell()


def _leads_to_a_process() -> bool:
    try:
        mode = os.fstat(_STANDARD_OUTPUT).st_mode
    except OSError:  # closed
        return False
    return stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode)


def _write(line: bytes) -> bool:
    """Whether the whole line went out."""
    try:
        return os.write(_STANDARD_OUTPUT, line) == len(line)
    except OSError:  # the pipe is full, or the parent is gone, of which standard input tells
        return False


class _Role:
    """The children that had one role, one after the other."""

    def __init__(self, began_ms: float) -> None:
        """None of them has told anything."""
        self.began_ms = began_ms
        self.of_ended = dict.fromkeys(RequestKind, 0)
        self.of_current = dict.fromkeys(RequestKind, 0)
        self.is_bad_line_told = False

    @property
    def sent(self) -> Sent:
        """By all of them."""
        return {kind: self.of_ended[kind] + self.of_current[kind] for kind in RequestKind}

    def begin_another(self) -> None:
        """A child counts from 0: keep what those before it have sent."""
        self.of_ended = dict(self.sent)
        self.of_current = dict.fromkeys(RequestKind, 0)


class ChildReports:
    """What the children of one server have told, added up over their restarts."""

    def __init__(self, clock: Clock) -> None:
        """There are no children yet."""
        self._clock = clock
        self._roles: dict[str, _Role] = {}

    def processes(self) -> Iterator[ProcessUse]:
        """What each role has sent, as far as it has told."""
        for name, role in self._roles.items():
            yield ProcessUse(name, role.began_ms, role.sent)

    async def read(self, name: str, stdout: asyncio.StreamReader) -> None:
        """Read what a child that begins with this role tells, to its end."""
        role = self._roles.setdefault(name, _Role(self._clock.monotonic_ms()))
        role.begin_another()
        while True:
            try:
                line = await stdout.readline()
                if not line.endswith(b"\n"):
                    return  # the end; half a line tells nothing
                role.of_current.update(parse_report(line))
            except ValueError:  # readline has dropped a line that is too long
                if not role.is_bad_line_told:
                    role.is_bad_line_told = True
                    _log.warning("child process writes what is no report", child=name)
