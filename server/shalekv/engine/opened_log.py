"""What an opening for writing ends with, and a writer starts from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shalekv.manifest.fenced import FencedManifest
from shalekv.protocol.entry import Entry
from shalekv.protocol.loads import CommittedLoad
from shalekv.read.memtable import Memtable
from shalekv.read.version import HeldTree
from shalekv.store.cas import CasStore
from shalekv.write.logical_time import LogicalTime
from shalekv.write.wal import LogSlots


@dataclass(frozen=True, slots=True)
class OpenedLog:
    """A log that is fenced and replayed."""

    store: CasStore
    manifest: FencedManifest
    held: HeldTree  # the levels
    slots: LogSlots
    memtable: Memtable
    time: LogicalTime
    last_wal_id: int
    last_seq: int
    first_seq: int  # that the writer may issue
    objects_replayed: int
    records: Sequence[Entry] = ()  # of idempotency keys, oldest first
    loads: Sequence[CommittedLoad] = ()  # whose records were replayed, oldest first
