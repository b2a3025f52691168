"""A log in memory as an archiver sees it, and databases whose manifests name its member."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace

from shalekv.errors import NotAMember, RecordTrimmed
from shalekv.format import names
from shalekv.format.footer import SstProperties
from shalekv.format.manifest import encode_manifest
from shalekv.format.quorum.member_files import MemberIdentity
from shalekv.format.wal_record import make_record
from shalekv.protocol.entry import Entry, Kind
from shalekv.protocol.manifest import Manifest, WalMode
from shalekv.protocol.membership import Member
from shalekv.protocol.quorum import acceptor
from shalekv.protocol.quorum.acceptor import AcceptorState
from shalekv.protocol.quorum_records import Ballot, LogEnd, LogShape, Record
from shalekv.runtime import Runtime
from shalekv.server.safekeeper.archiver import Archiver
from shalekv.settings import ArchivingSettings, StoreSettings
from shalekv.store.api import Created, ObjectStore, RequestKind
from shalekv.store.cas import CasStore
from shalekv.store.memory import MemoryStore
from shalekv.store.retry import Backoff
from shalekv.write.commit import WalContents
from shalekv.write.quorum.wal import object_bytes
from shalekv.write.wal import encode_wal

DATABASE_ID = b"d" * 16
A, B, C = b"a" * 16, b"b" * 16, b"c" * 16
EPOCH = 3
NONCE = b"n" * 16
DEADLINE_S = 30
# Polls and takes over as soon as it can: no test waits for a timeout.
EAGER = ArchivingSettings(
    archive_list_interval_ms=10,
    archive_unappointed_ms=10,
)
# Never does what it was not asked for.
PATIENT = EAGER.model_copy(update={"archive_unappointed_ms": 3_600_000})
QUICK_RETRIES = Backoff(1, 5)


class ArchiverStatus:
    """Status that an archiver reports."""

    def __init__(self) -> None:
        self.is_archiver = False
        self._problem = ""
        self._changed = asyncio.Event()

    @property
    def problem(self) -> str:
        return self._problem

    @problem.setter
    def problem(self, problem: str) -> None:
        self._problem = problem
        self._changed.set()
        self._changed = asyncio.Event()

    async def reported(self, *, problem: bool) -> str:
        """Wait until there is a problem, or none any more."""
        async with asyncio.timeout(DEADLINE_S):
            while bool(self._problem) != problem:
                await self._changed.wait()
        return self._problem


class HeldLog:
    """The log of one member, whose records are in memory."""

    def __init__(self, member_id: bytes = A, *, appointed: bytes = b"") -> None:
        self.identity = MemberIdentity(DATABASE_ID, member_id, "memory://test", bytes(16))
        self.state = AcceptorState(member_id, promise=Ballot(EPOCH, NONCE))
        self.archiver_id = appointed
        self.archiver_status = ArchiverStatus()
        self.is_space_wanted = False
        self.trims: list[LogEnd] = []
        self.dies_at_trim = False
        self._records: dict[int, Record] = {}
        self._is_retired = False
        self._changed = asyncio.Event()

    def append(self, records: Sequence[Record], *, committed_lsn: int) -> None:
        """Records that follow the log, and how far it is committed."""
        self._records |= {record.lsn: record for record in records}
        log = self.state.log.appended(records)
        self.state = replace(self.state, log=log, committed_lsn=committed_lsn)
        self._wake()

    def want_space(self) -> None:
        self.is_space_wanted = True
        self._wake()

    def clear_space_wanted(self) -> None:
        self.is_space_wanted = False

    def reset(self, base: LogEnd) -> None:
        self._records.clear()
        self.state = replace(self.state, log=LogShape(base), committed_lsn=base.lsn)
        self._wake()

    def retire(self) -> None:
        self._is_retired = True
        self._wake()

    async def records(self, first_lsn: int, last_lsn: int, *, bytes_max: int) -> Sequence[Record]:
        self._check()
        if first_lsn <= self.state.log.base.lsn:
            raise RecordTrimmed(f"record {first_lsn}")
        found: list[Record] = []
        for lsn in range(first_lsn, min(last_lsn, self.state.log.last.lsn) + 1):
            record = self._records[lsn]
            if found and sum(len(each.payload) for each in [*found, record]) > bytes_max:
                break
            found.append(record)
        await asyncio.sleep(0)
        return found

    async def wait_for_work(self, beyond_lsn: int, archiver_id: bytes) -> None:
        while self.state.committed_lsn <= beyond_lsn and self.archiver_id == archiver_id:
            self._check()
            if self.is_space_wanted:
                return
            await self._changed.wait()

    async def note_archived(self, wal_id: int, base: LogEnd) -> None:
        assert base.lsn <= self.state.committed_lsn
        if base.lsn > self.state.log.base.lsn:
            assert base == self._records[base.lsn].mark
            if self.dies_at_trim:
                raise NotAMember("the process ends here")
            self.trims.append(base)
        self.state = acceptor.archived(self.state, wal_id, base)
        for lsn in [lsn for lsn in self._records if lsn <= self.state.log.base.lsn]:
            del self._records[lsn]
        self._wake()

    async def reached(self, *, archived: int | None = None, trimmed_lsn: int = 0) -> None:
        async with asyncio.timeout(DEADLINE_S):
            while (
                archived is not None
                and (self.state.archived_wal_id is None or self.state.archived_wal_id < archived)
            ) or self.state.log.base.lsn < trimmed_lsn:
                await self._changed.wait()

    def _check(self) -> None:
        if self._is_retired:
            raise NotAMember("this member was retired")

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


@dataclass(slots=True)
class Written:
    """The log of a writer: all records, whichever members have them."""

    epoch: int = EPOCH
    records: list[Record] = field(default_factory=list)

    def write(self, text: str) -> list[Record]:
        """A record for each digit, in that object; a dot behind it ends the object.

        A minus is a record without a payload.
        """
        first = len(self.records)
        ends = [sign == "." for sign in text[1:]] + [False]
        wal_id = self.records[-1].wal_id if self.records else 0
        for sign, ends_object in zip(text, ends, strict=True):
            if sign == ".":
                continue
            wal_id = wal_id if sign == "-" else int(sign)
            mark = self.records[-1].mark if self.records else LogEnd()
            payload = b"" if sign == "-" else self._payload(wal_id, mark.lsn + 1)
            self.records.append(
                make_record(
                    mark,
                    epoch=self.epoch,
                    wal_id=wal_id,
                    ends_object=ends_object,
                    payload=payload,
                )
            )
        return self.records[first:]

    def object(self, wal_id: int) -> bytes:
        own = [record for record in self.records if record.wal_id == wal_id]
        return object_bytes(names.wal_name(wal_id), own)

    def _payload(self, wal_id: int, seq: int) -> bytes:
        own = SstProperties(
            name=names.wal_name(wal_id),
            database_id=DATABASE_ID,
            writer_epoch=self.epoch,
            writer_nonce=NONCE,
            write_id=b"id %013d" % seq,
            logical_time_ms=1_000 + seq,
        )
        return encode_wal(own, WalContents([Entry(b"key", seq, Kind.PUT, b"v" * 50)]), 4_096)


def manifest_of(manifest_id: int = 0, *members: bytes, c: int | None = None) -> Manifest:
    named = [Member(each, f"host-{each[:1].hex()}:1") for each in members]
    return Manifest(
        database_id=DATABASE_ID,
        manifest_id=manifest_id,
        write_id=b"manifest %07d" % manifest_id,
        wal_mode=WalMode.QUORUM,
        wal_members=tuple(map(str, named)),
        writer_epoch=EPOCH,
        writer_nonce=NONCE,
        wal_id_last_compacted=c,
    )


async def put_manifest(store: ObjectStore, manifest: Manifest) -> None:
    manifest = replace(manifest, cas_mode=store.cas_mode)
    name = names.manifest_name(manifest.manifest_id)
    assert isinstance(await store.create(name, encode_manifest(manifest)), Created)


def archiver_of(
    log: HeldLog, store: ObjectStore, runtime: Runtime, settings: ArchivingSettings = EAGER
) -> Archiver:
    cas = CasStore(store, runtime, StoreSettings(), backoff=QUICK_RETRIES)
    return Archiver(log, cas, settings)


@asynccontextmanager
async def running(*archivers: Archiver) -> AsyncIterator[None]:
    async with asyncio.timeout(2 * DEADLINE_S), asyncio.TaskGroup() as tasks:
        running = [tasks.create_task(each.run()) for each in archivers]
        try:
            yield
        finally:
            for task in running:
                task.cancel()


async def listed(store: MemoryStore) -> list[int | None]:
    # Past what a class below makes of lists.
    found = MemoryStore.list(store, names.WAL_FOLDER)
    return [names.parse_wal_name(info.name) async for info in found]


async def looked(store: MemoryStore, count: int) -> None:
    until = store.sent.by_kind[RequestKind.LIST] + 2 * count
    async with asyncio.timeout(DEADLINE_S):
        while store.sent.by_kind[RequestKind.LIST] < until:  # noqa: ASYNC110 - a counter
            await asyncio.sleep(0)
