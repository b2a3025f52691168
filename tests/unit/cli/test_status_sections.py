"""The status of a server as people read it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shalekv.cli.status_sections import print_sections, remarks_on
from shalekv.v1 import admin_pb2, kv_pb2, manifest_pb2
from shalekv_client import Status, WalMode
from shalekv_client.server_status import status_of

MIB = 1 << 20


def reply() -> admin_pb2.StatusReply:
    """A server that does well, and has something of everything."""
    return admin_pb2.StatusReply(
        header=kv_pb2.ReplyHeader(database_id=bytes(16), epoch=3, seq=77),
        version="1.2.3",
        url="file:///db",
        writer=admin_pb2.WriterStatus(commits=5, queued_bytes=1, queued_bytes_max=MIB),
        memtable=admin_pb2.MemtableStatus(keys=4, bytes=10, bytes_max=MIB),
        manifest=admin_pb2.ManifestStatus(manifest_id=9),
        memory=admin_pb2.MemoryStatus(
            bytes=1, bytes_max=2, parts=[admin_pb2.MemoryPart(name="memtables", bytes=1)]
        ),
        levels=admin_pb2.LevelsStatus(
            levels=[admin_pb2.LevelStatus(level=1, ssts=2, bytes=3 * MIB)],
            bytes=3 * MIB,
            space_amplification=1.1,
            read_amplification=2,
        ),
        compaction=admin_pb2.CompactionStatus(wal_objects=6, debt_bytes=MIB),
        reads=admin_pb2.ReadStatus(
            blocks=admin_pb2.CacheStatus(hits=900, misses=100, bytes_max=MIB),
            metadata=admin_pb2.CacheStatus(hits=1_000),
            filter_negatives=41,
        ),
        store_requests=[
            admin_pb2.StoreRequestStatus(operation="get_range", folder="levels", requests=123)
        ],
        snapshots=[
            admin_pb2.SnapshotStatus(
                snapshot=admin_pb2.SnapshotInfo(id=b"\x01" * 16, name="nightly", manifest_id=4),
                pinned_bytes=2 * MIB,
                pinned_alone_bytes=MIB,
            ),
            admin_pb2.SnapshotStatus(snapshot=admin_pb2.SnapshotInfo(id=b"\x02" * 16)),
        ],
    )


def status(**changes: object) -> Status:
    """The same as the client returns it, with other fields."""
    return replace(status_of(reply()), **changes)  # type: ignore[arg-type] # any field


def test_every_part_has_a_section(capsys: pytest.CaptureFixture[str]) -> None:
    """Levels, reads, requests and snapshots follow on what the process is."""
    print_sections(status())
    text = capsys.readouterr().out
    for expected in (
        "file:///db, served by version 1.2.3",
        "memtables",
        "3,145,728 bytes; not compacted: 6 WAL objects",
        "space amplification 1.10; a read looks into 2 SSTs at most",
        "90.0%",
        "filters kept 41 lookups",
        "get_range",
        "nightly",
        "02" * 16,
    ):
        assert expected in text
    assert "stands out" not in text


def test_a_reader_tells_how_it_follows_and_of_watches_and_calls(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Each has a section where there is anything to say, and the cache on disk a line."""
    told = reply()
    told.reader.CopyFrom(admin_pb2.ReaderStatus(next_wal_id=12, writer_address="10.0.0.5:7654"))
    told.watches.CopyFrom(admin_pb2.WatchStatus(watches=1_234))
    told.reads.disk.CopyFrom(admin_pb2.CacheStatus(hits=17))
    told.calls.add(method="KV.Get", calls=10, total_us=20_000, histogram_us=[0] * 10 + [10])
    print_sections(status_of(told))
    text = capsys.readouterr().out
    for expected in ("10.0.0.5:7654", "1,234", "Calls since the start", "KV.Get", "disk"):
        assert expected in text
    row = next(line for line in text.splitlines() if line.startswith("KV.Get")).split()
    assert row[:4] == ["KV.Get", "10", "0", "2.00"]


def with_quorum(**fields: object) -> admin_pb2.StatusReply:
    told = reply()
    told.manifest.wal_mode = manifest_pb2.WAL_MODE_QUORUM
    told.manifest.wal_members.extend(f"{n:02}@sk{n}:7655" for n in range(3))
    told.quorum.CopyFrom(
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
    return told


def test_safekeepers_have_a_section(capsys: pytest.CaptureFixture[str]) -> None:
    """How far each is, who archives, and who is away; nothing where there are none."""
    found = status_of(with_quorum())
    assert found.manifest.wal_mode is WalMode.QUORUM
    assert found.quorum is not None
    assert found.quorum.archiver == "sk1:7655"
    assert [each.archived_wal_id for each in found.quorum.members] == [None, 30, 30]
    print_sections(found)
    text = capsys.readouterr().out
    rows = {line.split()[0]: line.split()[1:] for line in text.splitlines() if line[:2] == "sk"}
    assert rows["sk1:7655"] == ["yes", "1,001", "30", "no"]
    assert rows["sk2:7655"] == ["no", "1,002", "30", "no"]
    assert "4,321" in text
    print_sections(status())
    assert "Safekeepers" not in capsys.readouterr().out


def test_what_stands_out_of_safekeepers() -> None:
    """Those that do not follow, and why writes are refused."""
    (away,) = remarks_on(status_of(with_quorum()))
    assert away.startswith("sk2:7655 do not follow")
    refused, _ = remarks_on(status_of(with_quorum(problem="no majority answers")))
    assert refused == "writes are refused: no majority answers"


def _remarks(changed: admin_pb2.StatusReply) -> list[str]:
    message = reply()
    message.MergeFrom(changed)
    return list(remarks_on(status_of(message)))


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        (
            admin_pb2.StatusReply(memtable=admin_pb2.MemtableStatus(bytes=MIB - 1)),
            "Is a compactor running?",
        ),
        (
            admin_pb2.StatusReply(writer=admin_pb2.WriterStatus(queued_bytes=MIB)),
            "wait for the object store",
        ),
        (
            admin_pb2.StatusReply(levels=admin_pb2.LevelsStatus(read_amplification=30)),
            "as many as 30 SSTs",
        ),
        (
            admin_pb2.StatusReply(levels=admin_pb2.LevelsStatus(space_amplification=3)),
            "3.0 times",
        ),
        (
            admin_pb2.StatusReply(
                reads=admin_pb2.ReadStatus(blocks=admin_pb2.CacheStatus(misses=99_100))
            ),
            "block_cache_bytes is 1,048,576",
        ),
        (
            admin_pb2.StatusReply(snapshots=[admin_pb2.SnapshotStatus(pinned_alone_bytes=4 * MIB)]),
            "one snapshot alone keeps 4,194,304 bytes",
        ),
    ],
)
def test_remarks(changed: admin_pb2.StatusReply, expected: str) -> None:
    """What explains a slow read, a write that waits, or a full bucket has a sentence of its own."""
    assert _remarks(admin_pb2.StatusReply()) == []
    (remark,) = _remarks(changed)
    assert expected in remark
