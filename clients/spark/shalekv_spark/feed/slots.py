"""The WAL objects of a batch, and what each task reads of them. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from pyspark.sql.datasource import InputPartition

from shalekv.errors import InvalidRequest, WalCollected
from shalekv.protocol.entry import KeyRange
from shalekv.protocol.loads import CommittedLoad
from shalekv.protocol.sst_table import SstTable

# --- offset
# Offsets of ``shalekv.changes``, which Spark stores as JSON with the keys `databaseId`, `walId`,
# `batchWalId` and `lastWriteId`.
#
# `walId` is the next WAL object to read. `batchWalId` is where the batch began that ends there:
# Spark asks for the initial offset again when the first batch of a query has to be repeated, and
# the log may have grown, or lost its oldest objects, in between. `lastWriteId` names the bytes of
# the object before `walId`: what was restored or made anew in the place of a database has others
# there.


OffsetValue = dict[str, "str | int"]


class FeedWalCollected(WalCollected):
    """What a stream has to read next was collected. Scan, and begin a new query behind that."""

    def __init__(self, problem: str) -> None:
        """`problem` names what is gone."""
        super(WalCollected, self).__init__(
            f"{problem} Nothing was left out silently: the stream ends here. Scan the database for "
            "what it holds now, and begin a query with a new checkpoint. A consumer name keeps the "
            "log while a query is down"
        )
        self.oldest_seq = 0  # not known: a stream goes by WAL objects


@dataclass(frozen=True, slots=True)
class FeedOffset:
    """A place between two WAL objects of one database."""

    database_id: bytes
    wal_id: int  # of the object behind it
    batch_wal_id: int | None = None  # None: it is the end of no batch
    last_write_id: bytes = b""  # of the object before it; empty: not known

    @property
    def batch(self) -> range:
        """The slots of the batch that ends here."""
        first = self.wal_id if self.batch_wal_id is None else self.batch_wal_id
        return range(first, self.wal_id)

    def as_dict(self) -> OffsetValue:
        """What Spark keeps. Equal offsets are equal texts."""
        value: OffsetValue = {"databaseId": self.database_id.hex(), "walId": self.wal_id}
        if self.batch_wal_id is not None:
            value["batchWalId"] = self.batch_wal_id
        if self.last_write_id:
            value["lastWriteId"] = self.last_write_id.hex()
        return value

    @classmethod
    def of(cls, value: Mapping[str, object]) -> FeedOffset:
        """What Spark has kept. Raises `InvalidRequest` when it is no offset of this source."""
        try:
            batch_wal_id = value.get("batchWalId")
            return cls(
                bytes.fromhex(str(value["databaseId"])),
                int(str(value["walId"])),
                None if batch_wal_id is None else int(str(batch_wal_id)),
                bytes.fromhex(str(value.get("lastWriteId", ""))),
            )
        except (KeyError, ValueError) as error:
            problem = f"{dict(value)} is none of a stream of changes ({error!r})"
            raise InvalidRequest("offset", problem) from None


# --- slots


# A request takes as long as so many bytes: a task with thousands of small objects has work, too.
OBJECT_COST_BYTES = 64 << 10


@dataclass(frozen=True, slots=True)
class FeedSlot:
    """A WAL object that is to be read."""

    wal_id: int
    size_bytes: int  # as the list of the store tells it
    epoch: int = 0  # of its writer; only known of those that commit a load
    load: CommittedLoad | None = None

    @property
    def read_bytes(self) -> int:
        """How much is read for it, the files of its load included."""
        if self.load is None:
            return self.size_bytes
        return self.size_bytes + sum(info.size_bytes for info in self.load.ssts)


@dataclass(frozen=True, slots=True)
class SlotsPart(InputPartition):
    """Neighbouring WAL objects, which one task reads."""

    database_id: bytes
    first_wal_id: int
    sizes_bytes: tuple[int, ...]

    @property
    def slots(self) -> range:
        """Their ids."""
        return range(self.first_wal_id, self.first_wal_id + len(self.sizes_bytes))


@dataclass(frozen=True, slots=True)
class LoadPart(InputPartition):
    """Some files of a load, which one task reads."""

    database_id: bytes
    epoch: int
    load: CommittedLoad  # with these files only


Part = SlotsPart | LoadPart


def admitted(
    slots: Iterable[FeedSlot], room_bytes: int, *, at_least: int = 1
) -> Iterator[FeedSlot]:
    """The first slots that fit into the room, and `at_least` so many in any case."""
    for number, slot in enumerate(slots):
        room_bytes -= slot.read_bytes
        if room_bytes < 0 and number >= at_least:
            return
        yield slot


def parts_of(
    slots: Iterable[FeedSlot], database_id: bytes, keys: KeyRange, part_bytes: int
) -> list[Part]:
    """Who reads what: neighbours together, as long as they are not more than `part_bytes`.

    Files of loads are read by tasks of their own, those without a key in `keys` by none.
    """
    parts: list[Part] = []
    neighbours: list[FeedSlot] = []
    cost_bytes = 0

    def end_part() -> None:
        if neighbours:
            sizes_bytes = tuple(each.size_bytes for each in neighbours)
            parts.append(SlotsPart(database_id, neighbours[0].wal_id, sizes_bytes))
            neighbours.clear()

    for slot in slots:
        if slot.load is not None:
            end_part()
            parts += _load_parts(slot, database_id, keys, part_bytes)
            continue
        slot_bytes = slot.size_bytes + OBJECT_COST_BYTES
        if cost_bytes + slot_bytes > part_bytes:
            end_part()
        if not neighbours:
            cost_bytes = 0
        neighbours.append(slot)
        cost_bytes += slot_bytes
    end_part()
    return parts


def _load_parts(
    slot: FeedSlot, database_id: bytes, keys: KeyRange, part_bytes: int
) -> Iterator[LoadPart]:
    load = slot.load
    assert load is not None
    infos = [
        info
        for info in load.ssts
        if info.last_key >= keys.start and (not keys.end or info.first_key < keys.end)
    ]
    while infos:
        count, size_bytes = 1, infos[0].size_bytes
        while count < len(infos) and size_bytes + infos[count].size_bytes <= part_bytes:
            size_bytes += infos[count].size_bytes
            count += 1
        ssts = SstTable.from_infos(infos[:count])
        yield LoadPart(database_id, slot.epoch, replace(load, ssts=ssts))
        infos = infos[count:]
