"""Each checker of an invariant finds what violates it, in histories and logs written by hand."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from itertools import count
from types import SimpleNamespace

import pytest

from shalekv.protocol.entry import Entry, Kind
from shalekv.protocol.manifest import Manifest, Snapshot, WalMode
from shalekv.protocol.sst_table import SstInfo, SstTable
from shalekv.v1 import kv_pb2
from tests.sim.errors import Violation
from tests.sim.history import Got, Outcome, Seen, WriteResult
from tests.sim.invariants import answers, log
from tests.sim.invariants.answers import (
    check_i2_nothing_comes_back,
    check_i6_replicas_show_prefixes,
)
from tests.sim.invariants.asked import TOO_LONG, check_i14_linearizable
from tests.sim.invariants.bounds import L0_RUNS_MAX, check_i13_l0
from tests.sim.level_states import check_i9_published_once
from tests.sim.levels import check_history
from tests.sim.serial import SerialOrder
from tests.sim.snapshot_readers import (
    Snapped,
    check_i7_snapshots_are_one_state,
    check_i7_what_was_promised_is_in_a_manifest,
)
from tests.sim.stored import Stored, WalObject
from tests.unit.sim.histories import DONE, KEYS, Past, attempted

ADD = kv_pb2.Change(add=kv_pb2.AddChange(key=b"a", delta=1))
SNAPSHOT = Snapshot(b"s" * 16, 1, 100)


def manifest(manifest_id: int, **fields: object) -> Manifest:
    given = {"database_id": bytes(16), "manifest_id": manifest_id, "write_id": bytes(16)}
    return Manifest(**(given | fields))  # type: ignore[arg-type]


def sst(number: int, *, level: int = 0) -> SstInfo:
    seq = number + 1
    return SstInfo(
        number.to_bytes(16, "big"), level, b"a", b"z", 0, 0, 0, 0, seq, seq, 1, 0, 100, 0
    )


def order_of(past: Past) -> SerialOrder:
    return SerialOrder(past.history, Stored((), tuple(past.wal)), KEYS)


def test_i1_lost_write(past: Past) -> None:
    """A write that was acknowledged and is not in the log is found."""
    answers.check_i1_acknowledged_writes_are_in_the_log(order_of(past))
    past.wal.pop()
    with pytest.raises(Violation, match=r"^I1: Put 2"):
        answers.check_i1_acknowledged_writes_are_in_the_log(order_of(past))


@pytest.mark.parametrize("has_entries", [False, True])
def test_i1_what_lands_late_among_ids_left_out(*, has_entries: bool) -> None:
    """Fences among the ids that a switch has left out hold back nothing; entries there do."""
    past = Past()
    if has_entries:
        attempted(past.put(b"b"), 500, 9_500, seq=past.landed(9_000, b="v1"), answer=DONE)
    else:
        past.landed(9_000)
    put = past.put(b"a", precondition=kv_pb2.Precondition(absent=True))
    seq = past.landed(2_000, a=f"v{put.number}")
    attempted(put, 1_000, 3_000, seq=seq, answer=DONE)
    with pytest.raises(Violation, match=r"^I1: .* not durable"):
        answers.check_i1_acknowledged_writes_are_in_the_log(order_of(past))
    left_out = manifest(1, wal_ids_left_out=(range(1, 2),))
    order = SerialOrder(past.history, Stored((left_out,), tuple(past.wal)), KEYS)
    with pytest.raises(Violation, match=r"^I1: .* not durable") if has_entries else nullcontext():
        answers.check_i1_acknowledged_writes_are_in_the_log(order)


def test_i2_old_version(past: Past) -> None:
    """An answer of a state that shows a version which was replaced before that state is found."""
    past.got(b"a", 6_500, Got(b"v2", 2), epoch=2)
    check_i2_nothing_comes_back(order_of(past))
    past.got(b"a", 9_000, Got(b"v1", 1), epoch=2)
    with pytest.raises(Violation, match=r"^I2: .* has become"):
        check_i2_nothing_comes_back(order_of(past))


def test_i3_data_of_an_older_writer(past: Past) -> None:
    """Data of an older writer behind those of a newer one are found."""
    log.check_i3_nothing_behind_a_fence_run(Stored((), tuple(past.wal)))
    past.landed(7_000, epoch=1, b="v3")
    with pytest.raises(Violation, match=r"^I3: slot 3"):
        log.check_i3_nothing_behind_a_fence_run(Stored((), tuple(past.wal)))


def test_i3_data_of_an_older_writer_behind_fences() -> None:
    """Data of an older writer behind as many fences as the manifest demands are found."""
    past = Past()
    past.landed(1_000)
    past.landed(2_000, a="v1")
    past.landed(3_000, epoch=2)
    past.landed(4_000, epoch=2)
    claims = (manifest(0), manifest(1, writer_epoch=1), manifest(2, writer_epoch=2, fence_width=2))
    lower = manifest(3, writer_epoch=2)  # when all was replayed: it has nothing of the fences
    wal = tuple(past.wal)
    log.check_i3_nothing_behind_a_fence_run(Stored((*claims, lower), wal))
    past.landed(5_000, epoch=1, a="v2")
    past.landed(6_000, epoch=2, a="v3")
    with pytest.raises(Violation, match=r"^I3: slot 5 .* behind all fences of epoch 2"):
        log.check_i3_nothing_behind_a_fence_run(Stored((*claims, lower), tuple(past.wal)))
    for few in (2, 3):  # fences that do not count yet
        cut = (*wal[:few], *past.wal[4:5])
        log.check_i3_nothing_behind_a_fence_run(Stored((*claims, lower), cut))


def test_i3_data_before_the_fences() -> None:
    """A writer that has written before its fences were complete is found."""
    past = Past()
    past.landed(1_000, epoch=1)
    past.landed(2_000, epoch=2)  # a slow opener's
    past.landed(3_000, epoch=1)
    past.landed(4_000, epoch=1, a="v1")
    claims = tuple(manifest(each, writer_epoch=each) for each in range(3))
    log.check_i3_nothing_behind_a_fence_run(Stored(claims[:2], tuple(past.wal[2:])))
    wide = (claims[0], manifest(1, writer_epoch=1, fence_width=2))
    with pytest.raises(Violation, match=r"^I3: slot 4 .* before all its fences"):
        log.check_i3_nothing_behind_a_fence_run(Stored(wide, tuple(past.wal)))
    elected = tuple(replace(each, wal_mode=WalMode.QUORUM) for each in wide)
    log.check_i3_nothing_behind_a_fence_run(Stored(elected, tuple(past.wal)))


def test_i4_gaps_and_order(past: Past) -> None:
    """A gap in the log is found, as is a number that is not above those before it."""
    wal = tuple(replace(each, wal_id=each.wal_id - 1) for each in past.wal)
    log.check_i4_slots_without_gaps(Stored((), wal))
    log.check_i4_slot_order_is_sequence_order(Stored((), wal))
    with pytest.raises(Violation, match=r"^I4: slot 1 comes where 0 should"):
        log.check_i4_slots_without_gaps(Stored((), wal[1:]))
    left_out = manifest(0, wal_ids_left_out=(range(5),))
    moved = tuple(replace(each, wal_id=each.wal_id + 5) for each in wal)
    log.check_i4_slots_without_gaps(Stored((left_out,), moved))
    with pytest.raises(Violation, match=r"^I4: slot 4 was left out, and has data"):
        log.check_i4_slots_without_gaps(Stored((left_out,), (replace(wal[0], wal_id=4), *moved)))
    with pytest.raises(Violation, match=r"^I4: slot 0"):
        log.check_i4_slot_order_is_sequence_order(Stored((), wal[::-1]))


@pytest.mark.parametrize("name", log.RISING)
def test_i5_manifest_goes_back(name: str) -> None:
    """A missing manifest is found, and one in which what must rise goes down."""
    first, second = manifest(0, **{name: 1}), manifest(1, **{name: 2})
    log.check_i5_manifests(Stored((first, second), ()))
    with pytest.raises(Violation, match=f"^I5: {name} goes down"):
        log.check_i5_manifests(Stored((first, manifest(1)), ()))
    with pytest.raises(Violation, match=r"^I5: manifest 2 follows 0"):
        log.check_i5_manifests(Stored((first, manifest(2, **{name: 2})), ()))


def test_i5_manifest_ids_in_time() -> None:
    """A manifest id that was skipped when it was created is found."""
    log.check_i5_manifest_ids_in_time([0, 1, 2, 1, 3])
    with pytest.raises(Violation, match=r"^I5: manifest 3"):
        log.check_i5_manifest_ids_in_time([0, 1, 3, 2])


def test_i5_logical_time(past: Past) -> None:
    """Logical time that goes back in the log is found, and a manifest that is behind its slots."""
    wal = tuple(past.wal)
    log.check_i5_logical_time_in_the_log(Stored((), wal))
    with pytest.raises(Violation, match=r"^I5: slot 1 is of"):
        log.check_i5_logical_time_in_the_log(Stored((), wal[::-1]))
    c = wal[1].wal_id
    behind = manifest(0, wal_id_last_compacted=c, logical_time_ms=wal[1].logical_time_ms - 1)
    with pytest.raises(Violation, match=r"^I5: manifest 0 is of"):
        log.check_i5_logical_time_in_the_log(Stored((behind,), wal))


def test_i5_logical_time_of_another_clock(past: Past) -> None:
    """A commit that is days ahead of the store's clock when it landed is found."""
    wal = tuple(replace(each, landed_us=0) for each in past.wal)
    first_ms = wal[0].logical_time_ms
    log.check_i5_logical_time_is_that_of_the_store(Stored((), wal), first_ms)
    with pytest.raises(Violation, match=r"^I5: slot 1 is 86400000 ms ahead"):
        log.check_i5_logical_time_is_that_of_the_store(Stored((), wal), first_ms - 86_400_000)


def test_i14_a_change_of_nothing_needs_no_durable_state() -> None:
    """A delete of no keys changes nothing in any state, also in one that is not durable yet."""
    request = kv_pb2.DeleteRangeRequest(range=kv_pb2.KeyRange(start=b"b", end=b"a"))
    order = SimpleNamespace(durable_at=lambda _us: 3, placed={})
    for asked, last in ((request, 5), (kv_pb2.WriteRequest(changes=[ADD]), 3)):
        operation = SimpleNamespace(number=1, request=asked)
        attempt = SimpleNamespace(replied_us=0, answer=None)
        assert answers._last_state(order, operation, attempt, 5) == last  # type: ignore[arg-type] # noqa: SLF001


def test_i5_a_number_twice(past: Past) -> None:
    """A number that was shown for a write to memory, and again for another one, is found."""
    log.check_i5_numbers_are_issued_once(order_of(past))
    attempted(past.put(b"b"), 1_000, 1_500, seq=2, answer=DONE)
    past.history.operations[-1].attempts[0].outcome = Outcome.IN_MEMORY
    with pytest.raises(Violation, match=r"^I5: number 2"):
        log.check_i5_numbers_are_issued_once(order_of(past))


def test_i5_numbers_of_another_writer(past: Past) -> None:
    """A writer in whose log there are numbers below those that it may issue is found."""
    opened = (manifest(0), manifest(1, writer_epoch=2, writer_first_seq=2))
    log.check_i5_a_writer_issues_numbers_of_its_own(Stored(opened, tuple(past.wal)))
    late = (manifest(0), manifest(1, writer_epoch=2, writer_first_seq=3))
    with pytest.raises(Violation, match=r"^I5: slot 2"):
        log.check_i5_a_writer_issues_numbers_of_its_own(Stored(late, tuple(past.wal)))


FIRST, SECOND = {b"a": Got(b"v1", 1)}, {b"a": Got(b"v2", 2)}


@pytest.mark.parametrize(
    ("seen", "problem"),
    [
        ([Seen("r", 2_500, 2_600, 1, 0, 0, KEYS, SECOND)], "shows Got"),
        ([Seen("r", 2_500, 2_600, 1, 0, 0, KEYS, {})], "does not show b'a'"),
        ([Seen("r", 1_000, 1_100, 1, 0, 0, KEYS, FIRST)], "not durable"),
        ([Seen("r", 2_500, 2_600, 1, 0, 2, KEYS, FIRST)], "its min_seq"),
        ([Seen("r", 2_000_000, 2_000_001, 1, 0, 0, KEYS, FIRST)], "older than it says"),
        (
            [
                Seen("r", 6_500, 6_600, 2, 0, 0, KEYS, SECOND),
                Seen("r", 6_700, 6_800, 1, 0, 0, KEYS, FIRST),
            ],
            "went back",
        ),
    ],
)
def test_i6_replica(past: Past, seen: list[Seen], problem: str) -> None:
    """A replica that shows no prefix, or a wrong, early, late or earlier one, is found."""
    right = [
        Seen("r", 2_500, 2_600, 1, 0, 1, KEYS, FIRST),
        Seen("r", 6_500, 6_600, 2, 0, 0, KEYS, SECOND),
    ]
    check_i6_replicas_show_prefixes(order_of(past), right)
    with pytest.raises(Violation, match=f"^I6: .*{problem}"):
        check_i6_replicas_show_prefixes(order_of(past), seen)


def test_i7_snapshots(past: Past) -> None:
    """Two reads of a snapshot that differ are found, one that the log does not have, and a promise
    that is in no manifest.
    """
    entry = Entry(b"a", 1, Kind.PUT, b"v1", 0)
    order = order_of(past)
    check_i7_snapshots_are_one_state(order, [Snapped(SNAPSHOT, 0, [(1, 0, (entry,))] * 2)])
    reads = [(1, 0, (entry,)), (1, 0, ())]
    with pytest.raises(Violation, match=r"^I7: .* reads"):
        check_i7_snapshots_are_one_state(order, [Snapped(SNAPSHOT, 0, reads)])
    with pytest.raises(Violation, match=r"^I7: .* shows"):
        check_i7_snapshots_are_one_state(order, [Snapped(SNAPSHOT, 0, [(1, 0, ())])])
    stored = Stored((manifest(0, snapshots=(SNAPSHOT,)),), ())
    check_i7_what_was_promised_is_in_a_manifest(stored, [Snapped(SNAPSHOT, 0)])
    with pytest.raises(Violation, match=r"^I7: .* was promised"):
        check_i7_what_was_promised_is_in_a_manifest(
            Stored((manifest(0),), ()), [Snapped(SNAPSHOT, 0)]
        )


def test_i9_published_twice() -> None:
    """An SST that comes back after it was replaced is found, and slots that are compacted again."""
    old, new = SstTable.from_infos([sst(0)]), SstTable.from_infos([sst(1, level=1)])
    states = [
        manifest(0),
        manifest(1, leveled_ssts=old, wal_id_last_compacted=0),
        manifest(2, leveled_ssts=new, wal_id_last_compacted=0),
    ]
    check_i9_published_once(Stored(tuple(states), ()))
    again = manifest(3, leveled_ssts=old, wal_id_last_compacted=0)
    with pytest.raises(Violation, match=r"^I9: .* comes back"):
        check_i9_published_once(Stored((*states, again), ()))
    added = SstTable.from_infos([sst(1, level=1), sst(2)])
    last = manifest(3, leveled_ssts=added, wal_id_last_compacted=0)
    with pytest.raises(Violation, match=r"^I9: .* adds SSTs"):
        check_i9_published_once(Stored((*states, last), ()))
    with pytest.raises(Violation, match=r"^I9: c goes down"):
        check_i9_published_once(Stored((*states, manifest(3, leveled_ssts=new)), ()))


def test_i13_l0_grows() -> None:
    """An L0 that is not merged is found."""
    full = SstTable.from_infos(sst(number) for number in range(L0_RUNS_MAX))
    check_i13_l0(Stored((manifest(0, leveled_ssts=full),), ()))
    fuller = SstTable.from_infos(sst(number) for number in range(L0_RUNS_MAX + 1))
    with pytest.raises(Violation, match=r"^I13: manifest 0"):
        check_i13_l0(Stored((manifest(0, leveled_ssts=fuller),), ()))


def test_i14_is_searched_without_a_log(past: Past) -> None:
    """The search finds a stale linearizable read, whatever the log says."""
    past.got(b"a", 9_000, Got(b"v2", 2), epoch=2, level="linearizable")
    assert check_i14_linearizable(past.history, KEYS) == {"keys judged": 3}
    past.got(b"a", 9_500, Got(b"v1", 1), epoch=2, level="linearizable")
    with pytest.raises(Violation, match=r"^I14: not linearizable"):
        check_i14_linearizable(past.history, KEYS)


def test_i14_committed_reads_are_searched(past: Past) -> None:
    """A stale committed read is found while no newer writer was called, and is allowed from then
    on.
    """
    past.got(b"a", 9_000, Got(b"v1", 1), epoch=2)
    with pytest.raises(Violation, match=r"^I14: not linearizable"):
        check_i14_linearizable(past.history, KEYS)
    past.got(b"b", 8_000, Got(), epoch=3)
    check_i14_linearizable(past.history, KEYS)


def test_i14_transactions_are_searched(past: Past) -> None:
    """The search finds half a batch in a transaction that reads two keys, each right by itself."""
    both = kv_pb2.WriteRequest()
    for key in (b"a", b"b"):
        both.changes.add().put.CopyFrom(kv_pb2.PutChange(key=key, value=b"v3"))
    attempted(past.asked(both), 7_500, 8_500, seq=3, answer=DONE, epoch=2)
    gets = [kv_pb2.TxnOperation(get=kv_pb2.GetRequest(key=key)) for key in (b"a", b"b")]
    reading = past.asked(kv_pb2.TxnRequest(then=gets))
    before = WriteResult(results=(Got(b"v2", 2), Got()))
    attempted(reading, 8_000, 9_000, seq=2, answer=before, epoch=2)
    assert check_i14_linearizable(past.history, KEYS)["ties judged"] == 1
    reading.attempts[0].answer = WriteResult(results=(Got(b"v2", 2), Got(b"v3", 3)))
    with pytest.raises(Violation, match=r"^I14: not linearizable"):
        check_i14_linearizable(past.history, KEYS)


def test_i14_a_search_that_is_too_long_is_counted(past: Past) -> None:
    """A search that was given up is reported, and never counts as passed."""
    found = check_i14_linearizable(past.history, KEYS, steps_max=1)
    assert found[f"keys {TOO_LONG}"] == 1


def test_i15_counter() -> None:
    """A counter that holds more than was added to it is found."""
    past = Past()
    attempted(
        past.add(5), 1_000, 3_000, seq=past.landed(2_000, n="5"), answer=WriteResult(results=(5,))
    )
    past.got(b"n", 4_000, Got((5).to_bytes(8, "little"), 1))
    answers.check_i15_counters(order_of(past), [b"n"])
    past.got(b"n", 5_000, Got((10).to_bytes(8, "little"), 1))
    with pytest.raises(Violation, match=r"^I15: b'n' holds 10, and 5"):
        answers.check_i15_counters(order_of(past), [b"n"])


def without_landing_times(past: Past) -> tuple[WalObject, ...]:
    """The log as it is found in a bucket, from slot 0 on."""
    return tuple(replace(each, wal_id=each.wal_id - 1, landed_us=None) for each in past.wal)


def test_a_history_of_processes_is_checked_without_landing_times(past: Past) -> None:
    """A bucket does not have landing times: what does not rest on them is checked all the same.

    An object was not there before the last write in it was requested.
    """
    for operation, slot in zip(past.history.operations, count()):
        operation.attempts[0].wal_id = slot
    past.got(b"a", 9_000, Got(b"v2", 2), epoch=2, level="linearizable")
    found = Stored((manifest(0),), without_landing_times(past))
    order = check_history(past.history, found)
    assert (order.durable_at(999), order.durable_at(1_000), order.durable_at(5_000)) == (0, 1, 2)
    past.got(b"a", 9_500, Got(b"v1", 1), epoch=2)
    with pytest.raises(Violation, match=r"^I14"):
        check_history(past.history, found)
    with pytest.raises(Violation, match=r"^I"):
        check_history(past.history, replace(found, wal=found.wal[1:]))
