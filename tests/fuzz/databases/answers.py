"""What a database answers: everything that anybody could ask who opens it."""

from __future__ import annotations

from dataclasses import dataclass

from shalekv.core.audit.finding import Finding
from shalekv.engine.fsck.check import Fsck
from shalekv.errors import ShaleError
from shalekv.roles.writer import Writer
from shalekv.v1 import kv_pb2
from tests.fuzz.databases.making import AGAIN, ONCE, StillPlace, call, roles_at
from tests.kit.household import CALL, running
from tests.kit.inline_runtime import gathered

Rows = list[tuple[bytes, bytes, int, int]]  # key, value, sequence number, expiry
SEED = 77


@dataclass(frozen=True, slots=True)
class Answers:
    """Of a database that was opened for writing."""

    epoch: int
    first_seq: int  # that the writer issues
    last_wal_id: int | None
    forwards: Rows
    by_key: Rows
    of_snapshots: tuple[Rows, ...]
    repeats: tuple[int, ...]  # the sequence numbers of commits that are asked for once more


async def answers(place: StillPlace, snapshot_ids: tuple[bytes, ...]) -> Answers:
    """Open a copy, and ask for everything. Raises what the roles raise."""
    async with roles_at(place.copy(), SEED) as roles:
        writer = await roles.open_writer()
        async with running(writer) as serving:
            engine = writer.engine
            found = Answers(
                epoch=writer.epoch,
                first_seq=engine.manifest.current.writer_first_seq,
                last_wal_id=engine.prefix.wal_id,
                forwards=await scanned(writer),
                by_key=await one_by_one(writer),
                of_snapshots=tuple([await scanned(writer, each) for each in snapshot_ids]),
                repeats=tuple([(await call(writer.kv.put, r)).header.seq for r in (ONCE, AGAIN)]),
            )
            writer.close()
            await serving
    return found


async def scanned(writer: Writer, snapshot_id: bytes = b"") -> Rows:
    """All entries, which are the same in both directions."""
    header = kv_pb2.RequestHeader(snapshot_id=snapshot_id)
    both: list[Rows] = []
    for reverse in (False, True):
        request = kv_pb2.ScanRequest(header=header, reverse=reverse)
        rows: Rows = []
        async for reply in writer.kv.scan(request, CALL):
            rows += [(e.key, e.value, e.seq, e.expire_at_ms) for e in reply.entries]
        both.append(rows)
    forwards, backwards = both
    assert backwards == forwards[::-1]
    return forwards


async def one_by_one(writer: Writer) -> Rows:
    """Every key that was ever written, by a get."""
    names = [b"%s%02d" % (kind, n) for kind in (b"low", b"mid", b"load") for n in range(16)]
    rows: Rows = []
    for key in (*names, b"once", b"once more", b"ttl"):
        reply = await call(writer.kv.get, kv_pb2.GetRequest(key=key))
        if reply.found:
            rows.append((key, reply.value, reply.seq, reply.expire_at_ms))
    return rows


async def judged(place: StillPlace, snapshot_ids: tuple[bytes, ...]) -> Answers | ShaleError:
    """The answers, or the documented error that somebody gets instead."""
    try:
        return await answers(place, snapshot_ids)
    except ShaleError as error:
        return error


async def damage(place: StillPlace) -> list[Finding]:
    """What the deep check finds, but for orphans."""
    found = await gathered(Fsck(place.cas(), is_deep=True).findings())
    return [each for each in found if each.kind.is_damage]
