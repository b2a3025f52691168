"""What is read of a member: a piece of the log once, or committed records as they come.

Nothing is held for whoever reads: each piece is fetched when the one before was taken. A reader
that is too slow loses its place when the log is trimmed, and goes on with the archive.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

from shalekv.protocol.quorum_records import Record
from shalekv.server.safekeeper.member import Member
from shalekv.settings import SafekeeperSettings
from shalekv.write.quorum.links import TailPiece


async def fetch(
    member: Member, first_lsn: int, settings: SafekeeperSettings
) -> AsyncIterator[Sequence[Record]]:
    """Records from `first_lsn` to the present end of the log, committed or not.

    It ends early when the log is cut meanwhile. Raises as `Member.records`.
    """
    last_lsn = member.state.log.last.lsn
    while first_lsn <= last_lsn:
        records = await member.records(first_lsn, last_lsn, bytes_max=settings.piece_bytes_max)
        if not records:
            return
        yield records
        first_lsn = records[-1].lsn + 1


async def tail(
    member: Member, first_wal_id: int, settings: SafekeeperSettings
) -> AsyncIterator[TailPiece]:
    """Committed records from the first of an object on, without end.

    The first piece comes at once, and one without records whenever nothing else was told for a
    while. Raises as `Member.records` and `Member.first_of_object`.
    """
    next_lsn = member.first_of_object(first_wal_id)
    yield TailPiece((), member.state.committed_lsn)
    while True:
        try:
            async with asyncio.timeout(settings.tail_heartbeat_ms / 1_000):
                committed_lsn = await member.wait_committed(next_lsn - 1)
        except TimeoutError:
            # It must not be told of what is only in the archive any more as if that were to come.
            member.check_readable(next_lsn)
            yield TailPiece((), member.state.committed_lsn)
            continue
        records = await member.records(next_lsn, committed_lsn, bytes_max=settings.piece_bytes_max)
        if not records:
            continue  # the log was cut: it has to be filled again first
        next_lsn = records[-1].lsn + 1
        told = [record for record in records if record.wal_id >= first_wal_id]
        if told:
            yield TailPiece(told, max(member.state.committed_lsn, told[-1].lsn))
