"""The status of a server for people, and the pictures of `shalekv top`."""

from __future__ import annotations

from dataclasses import replace

import pytest
from rich.console import Console

from shalekv.cli.commands.status import print_sections, print_summary
from shalekv.cli.commands.status_problems import problems, remarks
from shalekv.cli.commands.top import ROWS_MAX, Between, Observed, picture
from shalekv.cli.console.units import size
from shalekv.v1 import admin_pb2, kv_pb2, manifest_pb2
from shalekv_client import Status, WalMode
from shalekv_client.status import process_of, status_of

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


def reply(uptime_ms: int = 10_000, times: int = 1) -> admin_pb2.StatusReply:
    """The status of a healthy writer with data in every part."""
    return admin_pb2.StatusReply(
        header=kv_pb2.ReplyHeader(database_id=bytes(16), role=WRITER, epoch=3, seq=77),
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
        memory=admin_pb2.MemoryStatus(
            bytes=5 * MIB,
            bytes_max=16 * MIB,
            parts=[admin_pb2.MemoryPart(name="memtables", bytes=1)],
        ),
        levels=admin_pb2.LevelsStatus(
            levels=[admin_pb2.LevelStatus(level=1, ssts=2, bytes=7 * MIB, entries=4_321)],
            bytes=7 * MIB,
            space_amplification=1.25,
            read_amplification=2,
        ),
        compaction=admin_pb2.CompactionStatus(wal_objects=6, debt_bytes=2 * MIB),
        reads=admin_pb2.ReadStatus(
            blocks=admin_pb2.CacheStatus(hits=3 * times, misses=times, bytes=MIB, bytes_max=MIB),
            disk=admin_pb2.CacheStatus(hits=times, bytes=9 * MIB, bytes_max=32 * MIB),
            filter_negatives=41,
        ),
        store_requests=[
            admin_pb2.StoreRequestStatus(
                operation="create", folder="wal", requests=2 * times, bytes=MIB * times
            )
        ],
        snapshots=[
            admin_pb2.SnapshotStatus(
                snapshot=SNAPSHOT, pinned_bytes=2 * MIB, pinned_alone_bytes=MIB
            ),
            admin_pb2.SnapshotStatus(snapshot=admin_pb2.SnapshotInfo(id=b"\x02" * 16)),
        ],
        watches=admin_pb2.WatchStatus(watches=1_000, streams=20, catching_up=2, cut=1),
        calls=[
            call("KV.Get", 100 * times),
            call("KV.Put", 20 * times, failures=4 * times, bucket=13),
            call("KV.Watch", times, bucket=30),
            call("Admin.Status", times),
        ],
    )


def writer(uptime_ms: int, times: int) -> Status:
    return status_of(reply(uptime_ms, times))


def reader(seq: int, state: admin_pb2.ReaderStatus.State.ValueType) -> Status:
    reported = admin_pb2.StatusReply(
        header=kv_pb2.ReplyHeader(role=READER, epoch=3, seq=seq, staleness_ms=1_500),
        uptime_ms=60_000,
        url="file:///db",
        version="1.2.3",
        reader=admin_pb2.ReaderStatus(
            state=state, next_wal_id=11, poll_interval_ms=250, writer_address="10.0.0.5:7654"
        ),
    )
    return status_of(reported)


def drawn(*servers: Observed, width: int = 200) -> str:
    console = Console(width=width, force_terminal=False)
    with console.capture() as capture:
        console.print(picture(servers))
    return capture.get()


def line_of(text: str, *words: str) -> str:
    """The only line that has all of the words."""
    lines = [" ".join(line.split()) for line in text.splitlines()]
    found = [line for line in lines if all(word in line for word in words)]
    assert len(found) == 1, (words, text)
    return found[0]


def test_every_part_of_a_writer_is_drawn() -> None:
    """A writer has a line, writes, levels, snapshots, calls, caches, store and watches."""
    text = drawn(Observed("a:1", writer(10_000, 1), writer(12_000, 5)))
    first = line_of(text, "a:1 writer")
    assert first.startswith("a:1 writer 3 77 0 0 s serves 240 8.0 ")
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
    """A line has the lag behind the most advanced server, the staleness, and the state."""
    text = drawn(
        Observed("a:1", None, None, "no connection to the server"),
        Observed("b:2", None, reader(70, admin_pb2.ReaderStatus.STATE_GAP)),
        Observed("c:3", None, writer(10_000, 1)),
    )
    assert line_of(text, "a:1 - ").startswith("a:1 - - - - - no answer")
    assert "a:1: no connection to the server; trying again" in text
    assert line_of(text, "b:2 reader ").startswith("b:2 reader 3 70 7 1.5 s gap")
    assert line_of(text, "c:3 writer ").startswith("c:3 writer 3 77 0 0 s serves")
    assert "b:2, reader of file:///db, version 1.2.3, up 60 s" in text
    assert line_of(text, "asks again in").startswith("asks again in 250 ms")
    assert "10.0.0.5:7654" in text
    assert "tail of safekeeper" not in text


def test_a_reader_has_a_line_for_its_tail() -> None:
    """The tail of a reader has its address, or - while it reads none, and the number of tails."""
    status = reader(70, admin_pb2.ReaderStatus.State.STATE_FOLLOWING)
    assert status.reader is not None
    for address, shown in (("b:3", "b:3"), ("", "-")):
        tailing = replace(status, reader=replace(status.reader, tail_address=address, tails=1_002))
        line = line_of(drawn(Observed("b:2", None, tailing)), "tail of safekeeper")
        assert line.startswith(f"tail of safekeeper {shown}, 1,002 begun")


def test_processes_that_share_a_port_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    """Each process has a row in both, and a line of `top` says how many of them serve."""
    states = admin_pb2.ProcessStatus.State

    def shared(uptime_ms: int, calls: int) -> Status:
        following = reader(70, admin_pb2.ReaderStatus.State.STATE_FOLLOWING)
        first = admin_pb2.ProcessStatus(
            number=1, state=states.STATE_SERVING, pid=4_711, uptime_ms=9_000, seq=70, calls=calls
        )
        second = admin_pb2.ProcessStatus(number=2, state=states.STATE_ENDED, replacements=3)
        processes = (process_of(first), process_of(second))
        return replace(following, uptime_ms=uptime_ms, processes=processes)

    text = drawn(Observed("b:2", shared(60_000, 100), shared(62_000, 300)))
    assert line_of(text, "b:2 reader ").startswith("b:2 reader 3 70 0 1.5 s 1 of 2 serve")
    assert line_of(text, "1 serving").startswith("1 serving 100 70 0 s 9 s 0")
    assert line_of(text, "2 ended").startswith("2 ended - - - 0 s 3")
    print_sections(shared(60_000, 100))
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["1", "serving", "4711", "9", "s", "0", "70", "0", "s", "100"] in rows
    assert ["2", "ended", "-", "0", "s", "3", "-", "-", "0"] in rows


def test_names_of_users_are_no_markup() -> None:
    """Brackets in the name of a snapshot or in a problem are printed literally."""
    status = writer(10_000, 1)
    snapshot, _ = status.snapshots
    named = replace(status, snapshots=(replace(snapshot, name="[red]x[/red]"),))
    text = drawn(Observed("a:1", None, named), Observed("b:2", None, None, "[/bold] failed"))
    assert "[red]x[/red]" in text
    assert "[/bold] failed" in text


def test_long_lists_are_cut_and_say_so() -> None:
    """Long lists are cut; the snapshots that pin most alone come first."""
    status = writer(10_000, 1)
    snapshot, _ = status.snapshots
    many = tuple(
        replace(snapshot, name=f"snap{number:02}", pinned_alone_bytes=number)
        for number in range(ROWS_MAX + 3)
    )
    text = drawn(Observed("a:1", None, replace(status, snapshots=many)))
    assert "and 3 more" in text
    assert "snap10" in text
    assert "snap00" not in text


def test_rates_are_those_between_two_statuses() -> None:
    """Rates use the uptime of the process; percentiles those of the calls in between."""
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
    """Counters that went back give no negative rates."""
    between = Between(writer(90_000, 9), writer(2_000, 1))
    assert between.before is None
    assert between.seconds == 2
    assert between.all_calls().calls == 60
    assert [each.requests for each in between.requests()] == [1.0]


def test_every_part_has_a_section(capsys: pytest.CaptureFixture[str]) -> None:
    """The status has sections for levels, reads, requests and snapshots."""
    print_sections(writer(10_000, 1))
    text = capsys.readouterr().out
    for expected in (
        "memtables",
        "7.0 MiB; not yet merged into the levels: 6 WAL objects",
        "Space amplification: 1.25. Reading a key opens at most 2 SSTs.",
        "75.0%",
        "Bloom filters: 41 reads avoided, 0 false positives",
        "create",
        "nightly",
        "02" * 16,
    ):
        assert expected in text
    assert "Snapshots, and" in text
    print_sections(replace(writer(10_000, 1), snapshots=()))
    assert "Snapshots, and" not in capsys.readouterr().out


def test_a_healthy_server_is_well_and_summarized(capsys: pytest.CaptureFixture[str]) -> None:
    """The first line is that all is well; the summary has a line for each part that there is."""
    print_summary(writer(10_000, 1))
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert lines == [
        "All is well.",
        "",
        "role writer, epoch 3",
        "database file:///db",
        "version 1.2.3, up 10 s",
        "newest commit seq 77, 10 commits since the start",
        "calls 122 since the start, 4 failed",
        "memory 5.0 MiB / 16.0 MiB",
        "levels 2 SSTs, 7.0 MiB",
        "not merged 6 WAL objects, 3.0 MiB / 8.0 MiB in memory",
        "snapshots 2",
        "watches 1,000",
        "",
        "1 watch was ended since the start, too slow to take the commits.",
    ]
    print_summary(reader(70, admin_pb2.ReaderStatus.State.STATE_FOLLOWING))
    text = capsys.readouterr().out
    assert text.startswith("All is well.\n")
    assert "the writer 10.0.0.5:7654; at most 1.5 s behind" in text


def test_what_others_may_not_see_is_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    """A caller without the verb admin gets the cause of a failure, and no empty figures."""
    message = admin_pb2.StatusReply(header=kv_pb2.ReplyHeader(role=WRITER, epoch=3, seq=77))
    message.read_readiness.is_ready = True
    message.write_readiness.CopyFrom(admin_pb2.Readiness(cause="log full", unready_ms=9_000))
    print_summary(status_of(message))
    first, *rest = capsys.readouterr().out.splitlines()
    assert first.startswith("Problem: writes fail: log full for 9 s. Give the safekeepers more")
    assert not any("MiB" in line or " B" in line for line in rest)


def test_sizes_have_their_units() -> None:
    """Sizes are printed with units up to TiB, without an upper limit."""
    assert [size(each) for each in (None, 5, 3 << 20, 3_072 << 40)] == [
        "?",
        "5 B",
        "3.0 MiB",
        "3,072.0 TiB",
    ]


def test_a_reader_has_sections_for_following_watches_and_calls(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Following, watches and calls have sections if they have data; the disk cache has a line."""
    reported = reply()
    reported.reader.CopyFrom(admin_pb2.ReaderStatus(next_wal_id=12, writer_address="10.0.0.5:7654"))
    reported.watches.CopyFrom(admin_pb2.WatchStatus(watches=1_234))
    reported.reads.disk.CopyFrom(admin_pb2.CacheStatus(hits=17))
    reported.access.CopyFrom(admin_pb2.AccessStatus(denied=2_345, audit_lines_lost=3_456))
    del reported.calls[:]
    reported.calls.add(method="KV.Get", calls=10, total_us=20_000, histogram_us=[0] * 10 + [10])
    print_sections(status_of(reported))
    text = capsys.readouterr().out
    for expected in ("10.0.0.5:7654", "1234", "Calls since the start", "KV.Get", "disk"):
        assert expected in text
    for expected in ("Refused since the start", "2345", "3456"):
        assert expected in text
    row = next(line for line in text.splitlines() if line.startswith("KV.Get")).split()
    assert row[:4] == ["KV.Get", "10", "0", "2"]


def with_quorum(**fields: object) -> admin_pb2.StatusReply:
    reported = reply()
    reported.manifest.wal_mode = manifest_pb2.WAL_MODE_QUORUM
    reported.manifest.wal_members.extend(f"{n:02}@sk{n}:7655" for n in range(3))
    reported.quorum.CopyFrom(
        admin_pb2.QuorumStatus(
            generation=2,
            last_lsn=1_002,
            committed_lsn=1_001,
            last_wal_id=31,
            archived_wal_id=30,
            unarchived_bytes=4_321,
            archiver_id=b"1",
            members=[
                admin_pb2.QuorumMemberStatus(
                    member_id=b"%d" % n,
                    address=f"sk{n}:7655",
                    is_connected=n < 2,
                    flushed_lsn=1_000 + n,
                    archived_wal_id=30 if n else None,
                )
                for n in range(3)
            ],
            **fields,  # type: ignore[arg-type] # any field
        )
    )
    return reported


def test_safekeepers_have_a_section(capsys: pytest.CaptureFixture[str]) -> None:
    """A quorum has a section with the progress, archiver and connection of members, others none."""
    found = status_of(with_quorum())
    assert found.manifest.wal_mode is WalMode.QUORUM
    assert found.quorum is not None
    assert found.quorum.archiver == "sk1:7655"
    assert [each.archived_wal_id for each in found.quorum.members] == [None, 30, 30]
    print_sections(found)
    text = capsys.readouterr().out
    rows = {line.split()[0]: line.split()[1:] for line in text.splitlines() if line[:2] == "sk"}
    assert rows["sk1:7655"] == ["yes", "1001", "30", "no"]
    assert rows["sk2:7655"] == ["no", "1002", "30", "no"]
    assert "4321" in text
    print_sections(writer(10_000, 1))
    assert "Safekeepers" not in capsys.readouterr().out


def test_failures_come_first(capsys: pytest.CaptureFixture[str]) -> None:
    """Failing reads and writes are the first lines of the status, and in the line of `top`."""
    message = reply()
    message.write_readiness.CopyFrom(
        admin_pb2.Readiness(cause="no quorum", problem="1 of 3 answers.", unready_ms=61_700)
    )
    message.read_readiness.is_ready = True
    found = status_of(message)
    print_summary(found)
    reported = "writes fail: no quorum for 62 s: 1 of 3 answers"
    first = capsys.readouterr().out.splitlines()[0]
    assert first.startswith(f"Problem: {reported}. Start the safekeepers again, or replace")
    text = drawn(Observed("here:1", None, found))
    assert f"here:1: {reported}" in text
    assert "writes fail" in text.splitlines()[1]


def changed_by(changes: admin_pb2.StatusReply, message: admin_pb2.StatusReply) -> Status:
    message.MergeFrom(changes)
    return status_of(message)


STATES = admin_pb2.ReaderStatus.State
PROCESSES = admin_pb2.ProcessStatus.State
UNARCHIVED = admin_pb2.MemoryPart(name="unarchived_log_bytes_max", bytes=7, bytes_max=8)


@pytest.mark.parametrize(
    ("changes", "expected", "advice"),
    [
        (
            admin_pb2.StatusReply(memtable=admin_pb2.MemtableStatus(bytes=8 * MIB - 1)),
            "8.0 MiB / 8.0 MiB of writes are not merged into the levels yet",
            "compactor",
        ),
        (
            admin_pb2.StatusReply(writer=admin_pb2.WriterStatus(queued_bytes=4 * MIB)),
            "4.0 MiB / 4.0 MiB of writes wait for the store",
            "check the store",
        ),
        (
            admin_pb2.StatusReply(memory=admin_pb2.MemoryStatus(bytes=15 * MIB)),
            "15.0 MiB / 16.0 MiB of the memory for data are used",
            "memory_bytes",
        ),
        (
            admin_pb2.StatusReply(levels=admin_pb2.LevelsStatus(read_amplification=30)),
            "compaction is behind by about 2.0 MiB: reading a key opens up to 30 SSTs",
            "compactor",
        ),
        (
            admin_pb2.StatusReply(reader=admin_pb2.ReaderStatus(state=STATES.STATE_LOADING)),
            "the reader still loads",
            "Wait",
        ),
        (
            admin_pb2.StatusReply(reader=admin_pb2.ReaderStatus(state=STATES.STATE_GAP)),
            "waits for a WAL object",
            "check the writer",
        ),
        (
            admin_pb2.StatusReply(reader=admin_pb2.ReaderStatus(state=STATES.STATE_CUT_OFF)),
            "the store does not answer the reader",
            "network",
        ),
        (
            admin_pb2.StatusReply(reader=admin_pb2.ReaderStatus(state=STATES.STATE_FULL)),
            "the memory of the reader is full",
            "compactor",
        ),
        (
            admin_pb2.StatusReply(
                processes=[
                    admin_pb2.ProcessStatus(number=1, state=PROCESSES.STATE_SERVING),
                    admin_pb2.ProcessStatus(number=2, state=PROCESSES.STATE_SILENT),
                ]
            ),
            "process 2 of 2 is silent",
            "replaced",
        ),
        (
            admin_pb2.StatusReply(access=admin_pb2.AccessStatus(denied=1, audit_lines_lost=2)),
            "2 lines of the audit log could not be written",
            "disk",
        ),
    ],
)
def test_each_problem_has_a_line_with_advice(
    changes: admin_pb2.StatusReply, expected: str, advice: str
) -> None:
    """A healthy server has no problems; each limit that is near, or part that is behind, is one."""
    assert list(problems(changed_by(admin_pb2.StatusReply(), reply()))) == []
    (found,) = problems(changed_by(changes, reply()))
    assert expected in found.text
    assert advice in found.advice
    assert found.advice.endswith(".")
    assert not found.text.endswith(".")


def test_problems_of_safekeepers() -> None:
    """Members that do not follow, are full or lag are problems, and an archive that is behind.

    Without a quorum, who is away is said once, with the calls that fail.
    """

    def texts(message: admin_pb2.StatusReply) -> list[str]:
        return [each.text for each in problems(status_of(message))]

    away = "safekeeper sk2:7655 does not follow the writer"
    assert texts(with_quorum()) == [away]
    full, lagging, behind = with_quorum(), with_quorum(), with_quorum()
    full.quorum.members[0].is_full = True
    full.quorum.members[2].problem = "its disk was lost."
    assert texts(full) == ["safekeeper sk0:7655 is full", f"{away} (its disk was lost)"]
    lagging.quorum.committed_lsn += 20_000
    assert texts(lagging)[0] == "safekeeper sk0:7655 is 20,001 records behind the majority"
    dead = with_quorum()
    dead.write_readiness.CopyFrom(admin_pb2.Readiness(cause="no quorum", unready_ms=61_700))
    assert texts(dead) == ["writes fail: no quorum for 62 s; not connected: sk2:7655"]
    dead.read_readiness.CopyFrom(
        admin_pb2.Readiness(cause="no quorum", unready_ms=5, problem="sk2:7655 is away.")
    )
    dead.write_readiness.problem = "sk2:7655 is away."
    assert texts(dead) == ["reads and writes fail: no quorum for 62 s: sk2:7655 is away"]
    behind.memory.parts.append(UNARCHIVED)
    assert texts(behind)[-1].startswith("7 B / 8 B of the log are not in the store yet")


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (
            admin_pb2.StatusReply(levels=admin_pb2.LevelsStatus(space_amplification=3)),
            "3.0 times",
        ),
        (
            admin_pb2.StatusReply(
                reads=admin_pb2.ReadStatus(blocks=admin_pb2.CacheStatus(misses=99_100))
            ),
            "block_cache_bytes is 1.0 MiB",
        ),
        (
            admin_pb2.StatusReply(snapshots=[admin_pb2.SnapshotStatus(pinned_alone_bytes=8 * MIB)]),
            "One snapshot alone keeps 8.0 MiB",
        ),
        (admin_pb2.StatusReply(watches=admin_pb2.WatchStatus(cut=2)), "2 watches were ended"),
    ],
)
def test_remarks(changes: admin_pb2.StatusReply, expected: str) -> None:
    """Causes of slow reads and a full store, and watches that ended, have a remark each."""
    healthy = reply()
    healthy.watches.cut = 0
    assert list(remarks(status_of(healthy))) == []
    found = changed_by(changes, healthy)
    (remark,) = remarks(found)
    assert expected in remark
    assert list(problems(found)) == []
