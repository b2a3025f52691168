"""What a tail keeps up to date: a replica, which also follows the store."""

from __future__ import annotations

from collections.abc import Callable

from shalekv.format import names
from shalekv.format.section import Section
from shalekv.format.sst import open_sst
from shalekv.protocol.quorum_records import Record
from shalekv.protocol.tail import News, Position
from shalekv.replica.apply import Applying
from shalekv.replica.follow import Follower


class TailedReplica:
    """Implements `engine.tailing.Tailed`."""

    def __init__(
        self,
        applying: Applying,
        follower: Follower,
        *,
        database_id: bytes,
        see_archive: Callable[[], None],
    ) -> None:
        """`see_archive` asks that somebody looks how far the archive is, soon."""
        self._applying = applying
        self._follower = follower
        self._database_id = database_id
        self._see_archive = see_archive

    @property
    def position(self) -> Position:
        """How far it is."""
        return self._applying.position

    async def apply(self, record: Record) -> None:
        """Apply a record, unless that has happened meanwhile, as a part of its object."""
        found = None
        if record.payload:
            name = names.wal_name(record.wal_id)
            found = open_sst(name, record.payload, database_id=self._database_id)
            if found.index.blocks_of(Section.CONTROL):
                await self._follower.protect_load()
        if self._applying.position.judge(record) is News.NEXT:
            self._applying.apply_record(record, found)
        if self._applying.unarchived.is_half_full:
            self._see_archive()

    def has_no_room(self) -> bool:
        """Whether memory is full."""
        return self._follower.has_no_room()

    async def read_archive(self) -> None:
        """Look into the store, which has what comes next."""
        await self._follower.look()

    def is_fresh(self, at_ms: float) -> None:
        """Everything that was acknowledged before this moment of lapsed time is applied."""
        self._follower.is_fresh(at_ms)
