"""Sums that the parent of reader processes keeps over those that have had the same number."""

from __future__ import annotations

import asyncio
import socket
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from shalekv.cli.process.reader_messages import Asked, Question, ToParent, fitting
from shalekv.cli.process.reader_parent import Child, ChildPlace
from shalekv.server.replies.costs import counts_by_kind
from shalekv.store.api import RequestKind
from shalekv.telemetry.activity import Activity
from shalekv.telemetry.costs import BACKGROUND
from shalekv.v1 import admin_pb2
from tests.kit.constants import constants
from tests.unit.server.test_whole_costs import check_sums, origins, stats_of
from tests.unit.telemetry.test_costs import Process

STATS = Question(asked=Asked.STATS)
METHOD = admin_pb2.OriginCost.DIMENSION_METHOD


@asynccontextmanager
async def started() -> AsyncIterator[Child]:
    """A process that never says anything by itself."""
    (ours, theirs), (door, their_door) = socket.socketpair(), socket.socketpair()
    with theirs, their_door:
        process = await asyncio.create_subprocess_exec("true")
        await process.wait()
        _, writer = await asyncio.open_connection(sock=ours)
        child = Child(process, writer, door)
        yield child
        child.close()
        await writer.wait_closed()


def told_by(child: Child, process: Process) -> None:
    """Let the parent receive what a process has counted so far."""
    answer = stats_of(process).SerializeToString()
    child.receive(ToParent(answers=STATS, answer=answer), now_ms=0.0)


def counted(place: ChildPlace, asking: Child) -> admin_pb2.StatsReply:
    return admin_pb2.StatsReply.FromString(place.stats(asking))


async def test_costs_are_sums_over_processes_with_the_same_number() -> None:
    """The last numbers of a process that has ended remain, open calls as background; only
    the process that asks adds its own requests by itself.
    """
    place, running = ChildPlace(1, 0.0), Activity(0)
    first, second = Process(), Process()
    async with started() as other, started() as child, started() as next_child:
        place.child = child
        first.call("token:a", b"a/1", reads=3)
        told_by(child, first)
        first.send(RequestKind.READ, 4, running)
        told_by(child, first)
        assert counted(place, child) == admin_pb2.StatsReply()
        assert counts_by_kind(counted(place, other).processes[0].requests) == {"read": 7}
        place.end()
        check_sums(counted(place, other), Counter(read=7))
        place.child = next_child
        second.call("token:a", b"a/1", reads=5)
        told_by(next_child, second)
        check_sums(counted(place, next_child), Counter(read=7))
        both = counted(place, other)
        check_sums(both, Counter(read=12))
        place.end()
        assert counted(place, other) == both
    found = origins(both, METHOD)
    assert counts_by_kind(found["KV.Get"].requests) == {"read": 8}
    assert counts_by_kind(found[BACKGROUND].requests) == {"read": 4}


def test_answers_that_do_not_fit_into_a_message_are_missing() -> None:
    """The others are told: a message that is too long would end the process that gets it."""
    with constants({"shalekv.cli.process.reader_messages:ANSWERS_BYTES_MAX": 5}):
        assert [*fitting([b"abc", b"defg", b"", b"hi", b"j"])] == [b"abc", b"", b"", b"hi", b""]


async def test_a_process_that_ends_while_it_is_asked_has_no_answer() -> None:
    """A question to a process that has ended is over at once, even one for a profile."""
    profile = Question(asked=Asked.PROFILE, duration_ms=60_000, profile_id="1")
    async with started() as child:
        asking = [asyncio.create_task(child.ask(each)) for each in (STATS, profile)]
        await asyncio.sleep(0)
        child.close()
        assert await asyncio.gather(*asking) == [b"", b""]
