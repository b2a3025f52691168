"""How far a stream has come: the offsets of ``shalekv.changes``, as Spark writes them down.

    {"databaseId": "0f…", "walId": 17, "batchWalId": 12, "lastWriteId": "a8…"}

`walId` is the next WAL object to read. `batchWalId` is where the batch began that ends there: Spark
asks for the initial offset again when the first batch of a query has to be repeated, and the log
may have grown, or lost its oldest objects, in between. `lastWriteId` names the bytes of the object
before `walId`: what was restored or made anew in the place of a database has others there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from shalekv.errors import InvalidRequest, WalCollected

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
