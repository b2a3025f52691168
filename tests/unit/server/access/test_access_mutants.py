"""Mistakes in what asks the policy, each of which the matrix or a test of streams notices."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from shalekv.protocol.access import Need, Permissions, Verb
from shalekv.rpc import guarding, session
from shalekv.server.access import needs
from shalekv.server.access.guard import Guard
from shalekv.server.requests import PageSeal
from shalekv.v1 import kv_pb2
from tests.kit.processes.guarded import TokenBook
from tests.kit.processes.in_process import memory_store
from tests.sim.planting import Patch, planted
from tests.unit.server.access import test_matrix
from tests.unit.server.access import test_stream_ends as stream_ends
from tests.unit.server.access.matrix import foreign_tokens, guarded_database, holes
from tests.unit.server.access.sites import sites

# ruff: noqa: SLF001 - what a mutant replaces is private, as a rule
_real_allow = Permissions.allow
_real_answer = guarding.answer_guarded
_real_admit = guarding._admit_watch
_real_seal = PageSeal.seal


@dataclass(frozen=True)
class AccessMutant:
    """The shipped code with one mistake, and the sites at which the matrix must find a hole."""

    name: str
    patches: Sequence[Patch]
    sites: Collection[str]


def _table(**changed: needs.NeedsOf) -> Patch:
    """The table of needs with other entries for some requests."""
    replaced = {getattr(kv_pb2, name): entry for name, entry in changed.items()}
    return needs, "TABLE", {**needs.TABLE, **replaced}


def _without_otherwise(request: kv_pb2.TxnRequest) -> needs.Needs:
    return needs._txn(kv_pb2.TxnRequest(compares=request.compares, then=request.then))


def _without_compares(request: kv_pb2.TxnRequest) -> needs.Needs:
    return needs._txn(kv_pb2.TxnRequest(then=request.then, otherwise=request.otherwise))


def _all_but_deletes(guard: Guard, answer: Any, request: Any, *rest: Any, **named: Any) -> Any:
    if isinstance(request, kv_pb2.DeleteRequest):
        return answer(request, rest[0])
    return _real_answer(guard, answer, request, *rest, **named)


def _all_but_later_watches(
    guard: Guard, call: Any, create: kv_pb2.WatchCreate, end: Any
) -> Callable[[], None]:
    if create.watch_id:
        return lambda: None
    return _real_admit(guard, call, create, end)


def _first_key_alone(self: Permissions, need: Need) -> bool:
    start = need.keys.start
    return _real_allow(self, Need(need.verb, needs._key_range(start)))


def _without_previous(create: kv_pb2.WatchCreate) -> needs.Needs:
    return (Need(Verb.WATCH, needs.range_of(create.range)),)


def _without_condition(request: kv_pb2.PutRequest) -> needs.Needs:
    return (Need(Verb.WRITE, needs._key_range(request.key)),)


def _seal_of_nobody(self: PageSeal, rest: bytes, request: kv_pb2.ScanRequest) -> bytes:
    return _real_seal(replace(self, principal=""), rest, request)


def _sum_for_nothing(change: kv_pb2.Change) -> needs.Needs:
    return (Need(Verb.WRITE, needs._key_range(change.add.key)),)


def _touch_for_nothing(change: kv_pb2.Change) -> needs.Needs:
    return (Need(Verb.WRITE, needs._key_range(change.touch.key)),)


def _count_for_nothing(request: kv_pb2.DeleteRangeRequest) -> needs.Needs:
    return (Need(Verb.DELETE_RANGE, needs.range_of(request.range)),)


MUTANTS = (
    AccessMutant(
        "the branch of a Txn that is not taken first",
        [_table(TxnRequest=_without_otherwise)],
        {"Txn otherwise.change.put.key", "Session operations.txn.otherwise.get.key"},
    ),
    AccessMutant(
        "comparisons", [_table(TxnRequest=_without_compares)], {"Txn compares.range_empty"}
    ),
    AccessMutant(
        "one kind of operation in sessions",
        [(session, "answer_guarded", _all_but_deletes)],
        {"Session operations.delete.key"},
    ),
    AccessMutant(
        "watches after the first of a stream",
        [(guarding, "_admit_watch", _all_but_later_watches)],
        {"Watch create.range", "Watch create.range, previous_value"},
    ),
    AccessMutant(
        "previous values",
        [_table(WatchCreate=_without_previous)],
        {"Watch create.range, previous_value"},
    ),
    AccessMutant(
        "preconditions", [_table(PutRequest=_without_condition)], {"Put key, precondition"}
    ),
    AccessMutant(
        "the sum in the reply to an add",
        [(needs, "_CHANGES", {**needs._CHANGES, "add": _sum_for_nothing})],
        {"Write changes.add.key"},
    ),
    AccessMutant(
        "the result of a touch",
        [(needs, "_CHANGES", {**needs._CHANGES, "touch": _touch_for_nothing})],
        {"Txn then.change.touch.key"},
    ),
    AccessMutant(
        "the count of a delete",
        [_table(DeleteRangeRequest=_count_for_nothing)],
        {"DeleteRange range, count_deleted"},
    ),
    AccessMutant(
        "status without any right",
        [(Guard, "_check_needs", lambda _self, _caller, _needs: None)],
        {"Status"},
    ),
)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
async def test_the_matrix_notices(mutant: AccessMutant, tmp_path: Path) -> None:
    """A check that is left out shows in the matrix."""
    asked = [site for site in sites() if site.label in mutant.sites]
    assert len(asked) == len(mutant.sites)
    async with guarded_database(memory_store(), TokenBook(tmp_path)) as callers:
        with planted(mutant.patches):
            found = await holes(callers, asked)
    for site in asked:
        if site.label != "Watch create.range":
            assert any(site.label in hole for hole in found), site.label
    assert found


async def test_a_range_that_is_covered_in_part_is_noticed(tmp_path: Path) -> None:
    """Judging a range by its first key shows in the test of ranges."""
    with planted([(Permissions, "allow", _first_key_alone)]):
        await _fails(test_matrix.test_the_prefix_of_a_role_is_exact(tmp_path))


async def test_a_page_token_of_another_principal_is_noticed(tmp_path: Path) -> None:
    """It is refused, by a seal that says whose it is."""
    async with guarded_database(memory_store(), TokenBook(tmp_path)) as callers:
        assert await foreign_tokens(callers) == []
        with planted([(PageSeal, "seal", _seal_of_nobody)]):
            assert await foreign_tokens(callers)


async def _sweep_nothing(_self: Guard) -> None:
    """Look at no stream."""


@pytest.mark.parametrize(
    ("patch", "test"),
    [
        ((Guard, "_sweep", _sweep_nothing), stream_ends.test_streams_end_with_their_grant),
        (
            (Guard, "_check_identity", lambda _self, _caller: None),
            stream_ends.test_streams_end_with_their_token,
        ),
    ],
    ids=["the grant", "the token"],
)
async def test_streams_that_go_on_are_noticed(
    patch: Patch, test: Callable[[Path], Awaitable[None]], tmp_path: Path
) -> None:
    """Streams that outlive their right show in the tests of their ends."""
    with planted([patch, (stream_ends, "END_S", 1.0)]):
        await _fails(test(tmp_path))


async def _fails(test: Awaitable[None]) -> None:
    with pytest.raises((AssertionError, TimeoutError, BaseExceptionGroup)):
        await test
