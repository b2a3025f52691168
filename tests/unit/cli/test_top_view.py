"""What `shalekv top` draws, from statuses alone."""

from __future__ import annotations

from dataclasses import replace

from rich.console import Console

from shalekv.cli.top_rates import Between
from shalekv.cli.top_servers import Seen
from shalekv.cli.top_view import ROWS_MAX, picture
from shalekv.v1 import admin_pb2, kv_pb2
from shalekv_client import Status
from shalekv_client.server_status import status_of

MIB = 1 << 20
WRITER, READER = kv_pb2.Role.ROLE_WRITER, kv_pb2.Role.ROLE_READER
SNAPSHOT = admin_pb2.SnapshotInfo(id=b"\x01" * 16, name="nightly", manifest_id=4)


def call(method: str, calls: int, failures: int = 0, bucket: int = 9) -> admin_pb2.CallStatus:
    return admin_pb2.CallStatus(
        method=method,
        calls=calls,
        failures=failures,
        total_us=calls << bucket,
        histogram_us=[0] * bucket + [calls],
    )


def writer(uptime_ms: int, times: int, seq: int = 77) -> Status:
    reply = admin_pb2.StatusReply(
        header=kv_pb2.ReplyHeader(role=WRITER, epoch=3, seq=seq),
        version="1.2.3",
        url="file:///db",
        uptime_ms=uptime_ms,
        writer=admin_pb2.WriterStatus(
            commits=10 * times,
            wal_objects_written=2 * times,
            next_wal_id=12,
            wal_objects_in_flight=1,
            max_parallel_writes=4,
            queued_bytes=MIB,
            queued_bytes_max=4 * MIB,
        ),
        memtable=admin_pb2.MemtableStatus(bytes=3 * MIB, bytes_max=8 * MIB),
        manifest=admin_pb2.ManifestStatus(manifest_id=9),
        memory=admin_pb2.MemoryStatus(bytes=5 * MIB, bytes_max=16 * MIB),
        levels=admin_pb2.LevelsStatus(
            levels=[admin_pb2.LevelStatus(level=1, ssts=2, bytes=7 * MIB, entries=4_321)],
            bytes=7 * MIB,
            space_amplification=1.25,
            read_amplification=2,
        ),
        compaction=admin_pb2.CompactionStatus(wal_objects=6, debt_bytes=2 * MIB),
        reads=admin_pb2.ReadStatus(
            blocks=admin_pb2.CacheStatus(hits=3 * times, misses=times, bytes=MIB),
            disk=admin_pb2.CacheStatus(hits=times, bytes=9 * MIB, bytes_max=32 * MIB),
        ),
        store_requests=[
            admin_pb2.StoreRequestStatus(
                operation="create", folder="wal", requests=2 * times, bytes=MIB * times
            )
        ],
        snapshots=[
            admin_pb2.SnapshotStatus(
                snapshot=SNAPSHOT, pinned_bytes=2 * MIB, pinned_alone_bytes=MIB
            )
        ],
        watches=admin_pb2.WatchStatus(watches=1_000, streams=20, catching_up=2, cut=1),
        calls=[
            call("KV.Get", 100 * times),
            call("KV.Put", 20 * times, failures=4 * times, bucket=13),
            call("KV.Watch", times, bucket=30),
            call("Admin.Status", times),
        ],
    )
    return status_of(reply)


def reader(seq: int, state: admin_pb2.ReaderStatus.State.ValueType) -> Status:
    reply = admin_pb2.StatusReply(
        header=kv_pb2.ReplyHeader(role=READER, epoch=3, seq=seq, staleness_ms=1_500),
        uptime_ms=60_000,
        url="file:///db",
        version="1.2.3",
        reader=admin_pb2.ReaderStatus(
            state=state, next_wal_id=11, poll_interval_ms=250, writer_address="10.0.0.5:7654"
        ),
    )
    return status_of(reply)


def drawn(*servers: Seen, width: int = 200) -> str:
    console = Console(width=width, force_terminal=False)
    with console.capture() as capture:
        console.print(picture(servers))
    return capture.get()


def line_of(text: str, *words: str) -> str:
    """The one line that has all of the words."""
    lines = [" ".join(line.split()) for line in text.splitlines()]
    found = [line for line in lines if all(word in line for word in words)]
    assert len(found) == 1, (words, text)
    return found[0]


def test_every_part_of_a_writer_is_drawn() -> None:
    """Line of the server, writes, levels, snapshots, calls, caches, store and watches."""
    text = drawn(Seen("a:1", writer(10_000, 1), writer(12_000, 5)))
    first = line_of(text, "a:1 writer")
    assert first.startswith("a:1 writer 3 77 0 0 us serves 240 8.0 ")
    assert "5.0 MiB 1,000" in first
    for row in (
        "commits/s 20",
        "WAL objects/s 4.0",
        "next WAL object 12",
        "uploads in flight 1 / 4",
        "queued 1.0 MiB / 4.0 MiB",
        "memtable 3.0 MiB / 8.0 MiB",
        "WAL to compact 6 objects",
        "compaction debt 2.0 MiB",
        "1 2 7.0 MiB 4,321 0",
        "space x1.25, reads up to 2",
        "nightly 4 2.0 MiB 1.0 MiB never",
        "KV.Put 40 8.0",
        "blocks 75.0% 0 B 1.0 MiB",
        "disk 100.0% 0 B 9.0 MiB / 32.0 MiB",
        "create wal 4.0 - 2.0 MiB",
        "1,000 20 0 B 2 1",
    ):
        assert row in " ".join(text.split()), row


def test_each_server_has_a_line_and_the_first_that_answers_the_details() -> None:
    """How far each is behind the furthest, how old its state is, and what it does."""
    text = drawn(
        Seen("a:1", None, None, "no connection to the server"),
        Seen("b:2", None, reader(70, admin_pb2.ReaderStatus.STATE_GAP)),
        Seen("c:3", None, writer(10_000, 1)),
    )
    assert line_of(text, "a:1 - ").startswith("a:1 - - - - - no answer")
    assert "a:1: no connection to the server; trying again" in text
    assert line_of(text, "b:2 reader ").startswith("b:2 reader 3 70 7 1.5 s gap")
    assert line_of(text, "c:3 writer ").startswith("c:3 writer 3 77 0 0 us serves")
    assert "b:2, reader of file:///db, version 1.2.3, up 60.0 s" in text
    assert line_of(text, "asks again in").startswith("asks again in 250.0 ms")
    assert "10.0.0.5:7654" in text
    assert "tail of safekeeper" not in text


def test_a_reader_tells_whose_tail_it_reads() -> None:
    """And that it reads none now, after it has read some."""
    status = reader(70, admin_pb2.ReaderStatus.State.STATE_FOLLOWING)
    assert status.reader is not None
    for address, shown in (("b:3", "b:3"), ("", "-")):
        tailing = replace(status, reader=replace(status.reader, tail_address=address, tails=1_002))
        line = line_of(drawn(Seen("b:2", None, tailing)), "tail of safekeeper")
        assert line.startswith(f"tail of safekeeper {shown}, 1,002 begun")


def test_names_of_users_are_no_markup() -> None:
    """Brackets in the name of a snapshot or in a problem stand there as they are."""
    status = writer(10_000, 1)
    (snapshot,) = status.snapshots
    named = replace(status, snapshots=(replace(snapshot, name="[red]x[/red]"),))
    text = drawn(Seen("a:1", None, named), Seen("b:2", None, None, "[/bold] failed"))
    assert "[red]x[/red]" in text
    assert "[/bold] failed" in text


def test_long_lists_are_cut_and_say_so() -> None:
    """The snapshots that keep most alone come first."""
    status = writer(10_000, 1)
    (snapshot,) = status.snapshots
    many = tuple(
        replace(snapshot, name=f"snap{number:02}", pinned_alone_bytes=number)
        for number in range(ROWS_MAX + 3)
    )
    text = drawn(Seen("a:1", None, replace(status, snapshots=many)))
    assert "and 3 more" in text
    assert "snap10" in text
    assert "snap00" not in text


def test_rates_are_those_between_two_statuses() -> None:
    """By the time of the process; percentiles are those of the calls in between."""
    slow = replace(writer(10_000, 1), calls=())
    between = Between(slow, writer(14_000, 2))
    assert between.seconds == 4
    everything = between.all_calls()  # without watches and statuses
    assert (everything.calls, everything.failures) == (240 / 4, 8 / 4)
    assert everything.p50_us is not None
    assert 512 <= everything.p50_us <= 1_024
    assert everything.p99_us is not None
    assert 8_192 <= everything.p99_us <= 16_384
    assert [each.method for each in between.calls()][:2] == ["KV.Get", "KV.Put"]


def test_a_server_that_was_started_again_counts_from_its_start() -> None:
    """Counters that went back are no negative rates."""
    between = Between(writer(90_000, 9), writer(2_000, 1))
    assert between.before is None
    assert between.seconds == 2
    assert between.all_calls().calls == 60
    assert [each.requests for each in between.requests()] == [1.0]
