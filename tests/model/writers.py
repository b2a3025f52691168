"""What the model knows of writers and their clients, and how it judges replies."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from shalekv.clock import LoopClock
from shalekv.core.key_range import KeyRange
from shalekv.core.transaction import Add, Get, Operation
from shalekv.errors import ShaleError
from shalekv.roles.writer import Writer
from shalekv.v1 import kv_pb2
from tests.kit.store import HeldStore
from tests.model.oracle import Effect, Outcome, State, Version, contains


class ModelClock(LoopClock):
    """A clock that shows what the machine sets; waits take the time that they take."""

    def __init__(self) -> None:
        self._now_ms = 0

    def monotonic_ms(self) -> float:
        """What was set."""
        return self._now_ms

    def pass_time(self, duration_ms: int) -> None:
        """Time passes, for whoever looks at it."""
        self._now_ms += duration_ms


@dataclass(slots=True, eq=False)
class Asked:
    """A write that somebody waits for."""

    seq: int
    effects: Sequence[Effect]
    refused: type[ShaleError] | None
    rests_on_state: bool
    check: Callable[[Any], None]  # of its reply, but for its header
    answer: asyncio.Future[Any]
    idempotency_key: bytes


@dataclass(slots=True)
class Running:
    """A writer and what the model knows of it."""

    writer: Writer
    store: HeldStore
    task: asyncio.Task[None]
    pending: dict[int, Sequence[Effect]] = field(default_factory=dict)  # not durable, by number
    resting: set[int] = field(default_factory=set)  # those that rest on all before them
    asked: list[Asked] = field(default_factory=list)  # not answered
    shown_seq: dict[int, int] = field(default_factory=dict)  # by read level


def check_found(reply: Any, version: Version | None) -> None:
    """A reply shows this version, or that there is none."""
    shown = (reply.found, reply.value, reply.seq, reply.expire_at_ms)
    if version is None:
        assert shown == (False, b"", 0, 0)
    else:
        assert shown == (True, version.value, version.seq, version.expire_at_ms)


def cut(
    wanted: list[tuple[bytes, Version]], limit: int, limit_bytes: int
) -> list[tuple[bytes, Version]]:
    """What the limits leave."""
    kept: list[tuple[bytes, Version]] = []
    size_bytes = 0
    for key, version in wanted:
        if (limit and len(kept) >= limit) or (limit_bytes and size_bytes >= limit_bytes):
            break
        kept.append((key, version))
        size_bytes += len(key) + len(version.value)
    return kept


def check_scan(
    replies: Sequence[kv_pb2.ScanReply], request: kv_pb2.ScanRequest, now: State
) -> None:
    """A scan shows all that is there of its range, in its order, up to its limits."""
    keys = KeyRange(request.range.start, request.range.end)
    wanted = [
        (key, version)
        for key, version in sorted(now.items(), reverse=request.reverse)
        if key.startswith(request.range.prefix) and contains(keys, key)
    ]
    expected = cut(wanted, request.limit, request.limit_bytes)
    shown = [
        (entry.key, Version(entry.seq, entry.value, entry.expire_at_ms))
        for reply in replies
        for entry in reply.entries
    ]
    assert shown == expected
    assert replies[-1].more == (len(expected) < len(wanted))


def check_results(reply: Any, outcome: Outcome, taken: Sequence[Operation]) -> None:
    """What a batch has counted; what a transaction has read and counted."""
    if isinstance(reply, kv_pb2.WriteReply):
        assert list(reply.counters) == list(outcome.counters)
    elif isinstance(reply, kv_pb2.TxnReply):
        assert reply.succeeded is outcome.succeeded
        for operation, result, found in zip(taken, reply.results, outcome.results, strict=True):
            match operation:
                case Get():
                    assert result.WhichOneof("result") == "get"
                    assert isinstance(found, Version | None)
                    check_found(result.get, found)
                case Add():
                    assert (result.WhichOneof("result"), result.counter) == ("counter", found)
                case _:
                    assert result.WhichOneof("result") is None
