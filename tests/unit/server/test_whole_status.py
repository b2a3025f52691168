"""The status of processes that share a port is the sum of theirs, or that of the worst."""

from __future__ import annotations

from shalekv.server.whole_status import add_calls, add_slow_calls, add_status
from shalekv.telemetry.slow_calls import KEPT_MAX
from shalekv.v1 import admin_pb2, kv_pb2

STATE = admin_pb2.ReaderStatus.State


def status(
    seq: int, staleness_ms: int, state: admin_pb2.ReaderStatus.State.ValueType, **calls: list[int]
) -> admin_pb2.StatusReply:
    return admin_pb2.StatusReply(
        header=kv_pb2.ReplyHeader(seq=seq, wal_id=seq, epoch=3, staleness_ms=staleness_ms),
        memtable=admin_pb2.MemtableStatus(keys=7, bytes=10, bytes_max=100),
        memory=admin_pb2.MemoryStatus(
            bytes=10, bytes_max=100, parts=[admin_pb2.MemoryPart(name="a", bytes=10, bytes_max=100)]
        ),
        levels=admin_pb2.LevelsStatus(bytes=1_000),
        reads=admin_pb2.ReadStatus(
            blocks=admin_pb2.CacheStatus(hits=seq, bytes=5, bytes_max=50),
            disk=admin_pb2.CacheStatus(hits=1, bytes=77, bytes_max=99),
        ),
        reader=admin_pb2.ReaderStatus(state=state, next_wal_id=seq + 1, gaps=2),
        watches=admin_pb2.WatchStatus(watches=3, buffered_bytes_max=64),
        access=admin_pb2.AccessStatus(
            denied=1, unauthenticated=2, quota_exceeded=3, audit_lines_lost=4
        ),
        store_requests=[
            admin_pb2.StoreRequestStatus(operation="get", folder="wal", requests=seq),
            admin_pb2.StoreRequestStatus(operation="list", folder=f"{seq}", requests=1),
        ],
        calls=[
            admin_pb2.CallStatus(
                method=method, calls=sum(histogram), total_us=9, histogram_us=histogram
            )
            for method, histogram in calls.items()
        ],
    )


def test_a_whole_is_the_sum_and_as_old_as_its_oldest_part() -> None:
    """Counters and memory are added; what describes the database stays that of the first."""
    whole = status(70, 5, STATE.STATE_FOLLOWING, Get=[1, 2], Scan=[4])
    add_status(whole, status(60, 3, STATE.STATE_GAP, Get=[1, 0, 5], BatchGet=[6]))
    add_status(whole, status(65, 900, STATE.STATE_FOLLOWING))
    assert (whole.header.seq, whole.header.wal_id, whole.header.staleness_ms) == (60, 60, 900)
    assert (whole.reader.state, whole.reader.next_wal_id) == (STATE.STATE_GAP, 61)
    assert whole.reader.gaps == 6
    assert (whole.memtable.keys, whole.memtable.bytes, whole.memtable.bytes_max) == (7, 30, 300)
    assert (whole.memory.bytes_max, whole.memory.parts[0].bytes) == (300, 30)
    assert whole.levels.bytes == 1_000
    assert (whole.reads.blocks.hits, whole.reads.blocks.bytes_max) == (195, 150)
    disk = whole.reads.disk
    assert (disk.hits, disk.bytes, disk.bytes_max) == (3, 77, 99)  # one folder for all
    assert (whole.watches.watches, whole.watches.buffered_bytes_max) == (9, 64)
    refused = admin_pb2.AccessStatus(
        denied=3, unauthenticated=6, quota_exceeded=9, audit_lines_lost=12
    )
    assert whole.access == refused
    sent = {(each.operation, each.folder): each.requests for each in whole.store_requests}
    assert sent == {("get", "wal"): 195, ("list", "70"): 1, ("list", "60"): 1, ("list", "65"): 1}
    calls = {each.method: (each.calls, list(each.histogram_us)) for each in whole.calls}
    assert calls == {"BatchGet": (6, [6]), "Get": (9, [2, 2, 5]), "Scan": (4, [4])}
    assert [each.method for each in whole.calls] == sorted(calls)


def test_calls_are_added_by_method() -> None:
    """Shorter and longer histograms add up; the argument stays as it was."""
    whole = status(1, 0, STATE.STATE_FOLLOWING, Get=[0, 0, 8])
    more = status(1, 0, STATE.STATE_FOLLOWING, Get=[5]).calls
    add_calls(whole, more)
    add_calls(whole, more)
    (get,) = whole.calls
    assert (get.calls, get.total_us, list(get.histogram_us)) == (18, 27, [10, 0, 8])
    assert list(more[0].histogram_us) == [5]


def test_the_newest_slow_calls_of_all_are_kept() -> None:
    """Those of several processes are in one order, the newest first, and no more than of one."""
    calls = [
        admin_pb2.SlowCall(ended_at_ms=number, process=1 + number % 2)
        for number in range(3 * KEPT_MAX // 2)
    ]
    whole = admin_pb2.ListSlowCallsReply()
    for process in (1, 2):
        add_slow_calls(whole, [each for each in reversed(calls) if each.process == process])
    assert list(whole.calls) == calls[: -KEPT_MAX - 1 : -1]
