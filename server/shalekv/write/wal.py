"""The write-ahead log: its interface, and the log of WAL objects in the store.

`GroupCommit` writes to a `WriteAheadLog`: to `ObjectStoreWal`, here, or to
`write.quorum.wal.QuorumWal`, which is also `Safekeepers`. This module also encodes and lists WAL
objects.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from operator import itemgetter
from typing import Protocol

from shalekv.errors import OutcomeUnknown, ShaleError
from shalekv.format import names
from shalekv.format.block_frame import Codec
from shalekv.format.footer import SstProperties
from shalekv.format.sst import Sst, open_sst
from shalekv.format.sst_writer import encode_at_once, encode_sst
from shalekv.protocol.entry import NEVER_MS
from shalekv.protocol.fencing import (
    Occupant,
    SlotVerdict,
    WalListing,
    WriterId,
    fenced,
    judge,
)
from shalekv.settings import KIB
from shalekv.store.cas import CasStore, Taken
from shalekv.store.reachability import UNREACHABLE_AFTER_MS, Reachability
from shalekv.v1 import kv_pb2
from shalekv.wording import Trouble
from shalekv.write.commit import WalContents
from shalekv.write.log_stats import note_encoded

# A block is decoded as a whole and holds hundreds of entries, so that its frame costs nothing.
WAL_BLOCK_BYTES = 64 * KIB
# Larger objects are encoded by a worker, off the event loop; this much takes about 2 ms.
ENCODE_INLINE_COUNT = 4_000
ENCODE_INLINE_BYTES = 1 << 20
COMPRESS_INLINE_BYTES = ENCODE_INLINE_BYTES // 4  # compression takes some 2.5 ms for a megabyte
EPOCH_METADATA = "writer_epoch"  # user metadata of each WAL object
_KEY, _VALUE = itemgetter(0), itemgetter(3)  # of an Entry


@dataclass(frozen=True, slots=True)
class MemberReport:
    """The state of one safekeeper, as the writer knows it."""

    member_id: bytes
    address: str
    is_connected: bool
    flushed_lsn: int  # 0: not known
    archived_wal_id: int | None  # all objects up to it were seen in the store by this member
    is_full: bool
    is_next: bool  # a member of the next set, while a change is under way
    problem: str = ""  # why it does not follow the log


@dataclass(frozen=True, slots=True)
class QuorumReport:
    """The state of a quorum WAL, as the writer knows it."""

    generation: int
    members: tuple[MemberReport, ...]
    last_lsn: int
    committed_lsn: int
    last_wal_id: int | None  # the object of the last record
    archived_wal_id: int | None  # all objects up to it are in the store
    unarchived_bytes: int  # of records whose objects are not in the store
    archiver_id: bytes  # empty: nobody is appointed
    problem: str = ""  # why no writes are accepted


class WriteAheadLog(Protocol):
    """The storage of groups, below `GroupCommit`.

    The two kinds of log differ in values (`is_ordered`, `storage_name`, `durability`), which
    callers use without asking which log it is. Operations that only a log in safekeepers has are
    not here, but in `Safekeepers`.
    """

    @property
    def own(self) -> WriterId:
        """The writer that owns the log."""
        ...

    @property
    def is_ordered(self) -> bool:
        """Return whether groups become durable strictly in their order, none without those before
        it.

        If so, several may share an object.
        """
        ...

    @property
    def storage_name(self) -> str:
        """The storage that makes a group durable, in words for messages."""
        ...

    @property
    def durability(self) -> kv_pb2.Durability.ValueType:
        """The durability that the reply to a durable write reports."""
        ...

    @property
    def refusal(self) -> ShaleError | None:
        """The error for new groups while nothing can become durable; None: they are accepted."""
        ...

    def begin(self, next_wal_id: int) -> None:
        """Prepare for the first group: `next_wal_id` is the object after the durable watermark."""
        ...

    def take(self, size_bytes: int, *, is_load: bool) -> int:
        """Assign a WAL object to the next group, and return its id.

        It is the object of the group before, or the next one. A load is alone in its object.
        `create` follows for each group that was taken.
        """
        ...

    async def create(
        self, wal_id: int, contents: WalContents, *, position: int, time_max_ms: int = NEVER_MS
    ) -> Occupant | None:
        """Make a group durable. Returns None when it is, else the object of another in its slot.

        It records the present logical time, `time_max_ms` at most. `position` is how many groups
        were taken before this one. An ordered log stores groups in this order, in whatever order
        calls arrive, and always returns None. Repeats until the outcome is known. When this raises,
        the outcome is unknown: an ordered log raises the error that ended it, such as `Fenced`; for
        the other see `ObjectStoreWal.create`.
        """
        ...

    def trouble(
        self, after_ms: float = UNREACHABLE_AFTER_MS, *, reads: Trouble | None = None
    ) -> Trouble | None:
        """The reason why groups do not become durable, if that has been so for `after_ms`.

        `reads` is trouble with reads of the object store, which counts for a log in that store.
        """
        ...


class Safekeepers(Protocol):
    """The further operations of a log that is durable before its objects are in the store.

    A database without safekeepers has no such part; `WriterEngine.safekeepers` is None then.
    """

    async def run(self, on_unavailable: Callable[[], None]) -> None:
        """Follow the safekeepers, and end objects in time, until cancelled.

        Whenever nothing can become durable any more, `on_unavailable` is called once: calls should
        no longer wait for groups in flight, although these continue and may land. Raises the error
        that ends the log, also when nothing is written (`Fenced`).
        """
        ...

    async def archive(self, wal_id: int | None = None) -> None:
        """Wait until the object, and all before it, are objects of the store.

        None: all that has landed before this call. An object that is still open is ended. Raises
        the error that ends the log, and `QuorumUnavailable` when it cannot be archived now.
        """
        ...

    async def unarchived(self, wal_id: int) -> Sst | None:
        """Read what has landed of an object that may not be in the store yet, as one SST.

        None: the object is in the store, or was. An object may grow until a later one is taken.
        """
        ...

    def report(self) -> QuorumReport:
        """The state of the safekeepers."""
        ...


class ObjectStoreWal:
    """The WAL of one database in the object store: the log of one writer.

    Each group is a WAL object of its own, in a slot of its own.
    """

    is_ordered = False
    storage_name = "the object store"
    durability = kv_pb2.DURABILITY_DURABLE
    refusal = None  # uploads repeat until they succeed, and the queue bounds what waits

    def __init__(
        self,
        store: CasStore,
        own: WriterId,
        *,
        database_id: bytes,
        block_bytes: int,
        now_ms: Callable[[], int],
        last_compacted: Callable[[], Awaitable[int | None]],
        codec: Codec = Codec.NONE,
    ) -> None:
        """`now_ms` is logical time, which every object records.

        `last_compacted` reads the manifest when called, and returns c, the last compacted WAL
        object.
        """
        self._last_compacted = last_compacted
        self._store = store
        self._database_id = database_id
        self._block_bytes = block_bytes
        self._codec = codec
        self._now_ms = now_ms
        self._next_wal_id = 0
        self.own = own
        self._metadata = {EPOCH_METADATA: str(own.epoch)}
        self._uploads = Reachability(store.runtime.clock)

    def begin(self, next_wal_id: int) -> None:
        self._next_wal_id = next_wal_id

    def take(self, size_bytes: int, *, is_load: bool) -> int:
        del size_bytes, is_load
        self._next_wal_id += 1
        return self._next_wal_id - 1

    def trouble(
        self, after_ms: float = UNREACHABLE_AFTER_MS, *, reads: Trouble | None = None
    ) -> Trouble | None:
        """The reason why no upload has succeeded for `after_ms`; else `reads`."""
        return self._uploads.trouble(after_ms) or reads

    async def create(
        self, wal_id: int, contents: WalContents, *, position: int = 0, time_max_ms: int = NEVER_MS
    ) -> Occupant | None:
        """Fill slot `wal_id` with an SST of `contents`; without entries it is a fence.

        Returns None when our object is there, else the one that is; then nothing of ours will ever
        be in the slot (I3). Repeats until that is known. Entries are retried even when the
        store refuses them, so that a writer goes on once it has its permission again. For a fence
        `StoreRefused` is raised, and the opening ends. Raises `StoreBroken`, `CorruptObject` when
        the object in the slot cannot be read; and when ours may have been compacted before
        another came there, `Fenced` if that is a newer writer's, else `OutcomeUnknown`.
        """
        del position  # slots are independent of each other
        name = names.wal_name(wal_id)
        properties = SstProperties(
            name=name,
            database_id=self._database_id,
            writer_epoch=self.own.epoch,
            writer_nonce=self.own.nonce,
            write_id=self._store.runtime.random.randbytes(16),
            logical_time_ms=min(self._now_ms(), time_max_ms),
        )
        if is_small(contents, self._codec):
            data = encode_wal(properties, contents, self._block_bytes, self._codec)
        else:
            run = self._store.runtime.workers.run
            data = await run(encode_wal, properties, contents, self._block_bytes, self._codec)
        note_encoded()
        outcome = await self._store.claim(
            name, data, self._metadata, is_patient=any(contents), uploads=self._uploads
        )
        if isinstance(outcome, Taken):
            occupant = occupant_of(open_sst(name, outcome.data, database_id=self._database_id))
            if not outcome.is_first_owner:
                await self._check_not_compacted(wal_id, occupant)
            return occupant
        return None

    async def _check_not_compacted(self, wal_id: int, occupant: Occupant) -> None:
        """Raise an error if the slot may have been collected, and then filled by `occupant`.

        The first object of a slot is deleted only after it was compacted.
        """
        last_compacted = await self._last_compacted()
        if last_compacted is not None and last_compacted >= wal_id:
            if judge(occupant, self.own) is SlotVerdict.NEWER:
                raise fenced(self.own, occupant.owner.epoch, f"WAL slot {wal_id}")
            raise OutcomeUnknown(
                f"{names.wal_name(wal_id)} was compacted while the object store had not answered, "
                "and another object is there now: the write may be applied or not. Read the "
                "key to find out, or write it again"
            )


def encode_wal(
    properties: SstProperties,
    contents: WalContents,
    block_bytes: int,
    codec: Codec = Codec.NONE,
) -> bytes:
    """Encode a WAL object."""
    points, range_tombstones, records, control = contents
    if (points or records) and not range_tombstones and not control:
        return encode_at_once(properties, points, records, block_bytes=block_bytes, codec=codec)
    return encode_sst(
        properties,
        contents.points,
        contents.range_tombstones,
        contents.records,
        contents.control,
        block_bytes=block_bytes,
        codec=codec,
    )


def is_small(contents: WalContents, codec: Codec) -> bool:
    """Return whether the contents are encoded so fast that no worker is needed."""
    if sum(map(len, contents)) > ENCODE_INLINE_COUNT:
        return False
    size_bytes = 0
    for part in contents:
        size_bytes += sum(map(len, map(_KEY, part))) + sum(map(len, map(_VALUE, part)))
    return size_bytes <= (ENCODE_INLINE_BYTES if codec is Codec.NONE else COMPRESS_INLINE_BYTES)


def occupant_of(sst: Sst) -> Occupant:
    """The owner of a WAL object, and whether it is a fence."""
    properties = sst.properties
    owner = WriterId(properties.writer_epoch, properties.writer_nonce)
    return Occupant(owner, is_fence=sst.footer.contents.entry_count == 0)


async def list_wal(store: CasStore, first: int) -> WalListing:
    """List the slots from `first` on."""
    start_after = names.wal_name(first - 1) if first else ""
    filled = set()
    async for info in store.list(names.WAL_FOLDER, start_after=start_after):
        wal_id = names.parse_wal_name(info.name)
        if wal_id is not None:
            filled.add(wal_id)
    return WalListing(first, frozenset(filled))
