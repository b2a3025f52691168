"""Offsets of a stream of changes, and the division of the WAL objects of a batch into tasks.

No function here does I/O.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from pyspark.sql.datasource import InputPartition

from shalekv.errors import InvalidRequest, WalCollected
from shalekv.protocol.entry import KeyRange
from shalekv.protocol.loads import CommittedLoad
from shalekv.protocol.sst_table import SstTable

OffsetValue = dict[str, "str | int"]

# A request takes as long as reading so many bytes, so a task of many small objects has enough work.
OBJECT_COST_BYTES = 64 << 10


class FeedWalCollected(WalCollected):
    """An object that a stream has to read was collected. Scan, and begin a query behind that."""

    def __init__(self, problem: str) -> None:
        """Create an error; `problem` names the object that is gone."""
        super(WalCollected, self).__init__(
            f"{problem} Nothing was left out silently: the stream ends here. Scan the database for "
            "what it holds now, and begin a query with a new checkpoint. A consumer name keeps the "
            "log while a query is down"
        )
        self.oldest_seq = 0  # not known: the position of a stream is a WAL object


@dataclass(frozen=True, slots=True)
class FeedOffset:
    """An offset of ``shalekv.changes``: a position between two WAL objects of one database.

    Spark stores it as JSON with the keys `databaseId`, `walId`, `batchWalId` and `lastWriteId`.

    `batch_wal_id` is needed when the first batch of a query is repeated: Spark then asks for the
    initial offset again, and the log may have grown, or lost its oldest objects, in between.
    `last_write_id` identifies the contents of the object before the position: a database that was
    restored or created anew in the same place has another object there.
    """

    database_id: bytes
    wal_id: int  # of the object behind the position: the next one to read
    batch_wal_id: int | None = None  # the beginning of the batch that ends here; None: none does
    last_write_id: bytes = b""  # of the object before the position; empty: not known

    @property
    def batch(self) -> range:
        """The slots of the batch that ends here."""
        first = self.wal_id if self.batch_wal_id is None else self.batch_wal_id
        return range(first, self.wal_id)

    def as_dict(self) -> OffsetValue:
        """Return the value that Spark stores. Equal offsets have equal JSON."""
        value: OffsetValue = {"databaseId": self.database_id.hex(), "walId": self.wal_id}
        if self.batch_wal_id is not None:
            value["batchWalId"] = self.batch_wal_id
        if self.last_write_id:
            value["lastWriteId"] = self.last_write_id.hex()
        return value

    @classmethod
    def of(cls, value: Mapping[str, object]) -> FeedOffset:
        """Parse a stored offset. Raises `InvalidRequest` when it is not one of this source."""
        try:
            batch_wal_id = value.get("batchWalId")
            return cls(
                bytes.fromhex(str(value["databaseId"])),
                int(str(value["walId"])),
                None if batch_wal_id is None else int(str(batch_wal_id)),
                bytes.fromhex(str(value.get("lastWriteId", ""))),
            )
        except (KeyError, ValueError) as error:
            problem = f"{dict(value)} is not an offset of a stream of changes ({error!r})"
            raise InvalidRequest("offset", problem) from None


@dataclass(frozen=True, slots=True)
class FeedSlot:
    """A WAL object that is to be read."""

    wal_id: int
    size_bytes: int  # from the list of the store
    epoch: int = 0  # of its writer; only known of those that commit a load
    load: CommittedLoad | None = None

    @property
    def read_bytes(self) -> int:
        """The bytes that are read for it, the files of its load included."""
        if self.load is None:
            return self.size_bytes
        return self.size_bytes + sum(info.size_bytes for info in self.load.ssts)


@dataclass(frozen=True, slots=True)
class SlotsPart(InputPartition):
    """Adjacent WAL objects, which one task reads."""

    database_id: bytes
    first_wal_id: int
    sizes_bytes: tuple[int, ...]

    @property
    def slots(self) -> range:
        """The ids of the WAL objects."""
        return range(self.first_wal_id, self.first_wal_id + len(self.sizes_bytes))


@dataclass(frozen=True, slots=True)
class LoadPart(InputPartition):
    """Some files of a load, which one task reads."""

    database_id: bytes
    epoch: int
    load: CommittedLoad  # with these files only


Part = SlotsPart | LoadPart


def admitted(
    slots: Iterable[FeedSlot], budget_bytes: int, *, at_least: int = 1
) -> Iterator[FeedSlot]:
    """Return the first slots that fit into `budget_bytes`, but `at_least` so many in any case."""
    for number, slot in enumerate(slots):
        budget_bytes -= slot.read_bytes
        if budget_bytes < 0 and number >= at_least:
            return
        yield slot


def parts_of(
    slots: Iterable[FeedSlot], database_id: bytes, keys: KeyRange, part_bytes: int
) -> list[Part]:
    """Divide slots into the parts of tasks: adjacent ones together, up to `part_bytes`.

    Files of loads are parts of their own; files without a key in `keys` are not read.
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
