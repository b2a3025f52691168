"""What a simulation is given beside the workload, and what it tells."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from shalekv.core.compaction.bill import Bill, Prices, Requests
from shalekv.core.compaction.window import SourceChoice
from shalekv.settings.jobs import CompactorSettings
from shalekv.settings.levels import LevelSettings
from shalekv.settings.model import GIB, KIB, MIB


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """The settings and the machine on which a workload is simulated."""

    compactor: CompactorSettings = field(default_factory=CompactorSettings)
    levels: LevelSettings = field(default_factory=LevelSettings)
    choice: SourceChoice = SourceChoice.SMALLEST_OVERLAP
    flush_interval_ms: int = 50
    flush_bytes: int = 4 * MIB
    wal_block_bytes: int = 64 * KIB
    uncompacted_bytes_max: int = 1 * GIB  # past it writes wait
    compaction_bytes_per_s: float = 60_000_000.0  # read, and written again
    job_s: float = 0.3  # what a job takes beside its bytes: edits of the manifest
    request_bytes: int = 1 * MIB  # of an SST that a compaction reads at once
    collect_age_s: float = 300.0  # how long what was replaced is kept
    prices: Prices = field(default_factory=Prices)


@dataclass(frozen=True, slots=True)
class Amplification:
    """Bytes in the store for a byte of keys and values.

    `write`: bytes of all WAL objects and SSTs ever written, for a byte that clients wrote. `space`:
    bytes of the SSTs of the tree, for a byte of what clients would find, when all is compacted that
    needs to be; `space_max` while writing, from half of the workload on, the WAL after c included.
    `read`: SSTs whose range has a key that is looked for, on average while writing.
    """

    write: float
    read: float
    space: float
    space_max: float


@dataclass(frozen=True, slots=True)
class Sample:
    """The state at one moment."""

    elapsed_s: float
    live_bytes: int
    wal_bytes: int
    l0_count: int
    level_bytes: Mapping[int, int]
    read: float
    space: float


@dataclass(frozen=True, slots=True)
class Simulated:
    """What became of a workload."""

    amplification: Amplification
    scan_blocks: float  # that a scan looks at
    l0_count_max: int
    wal_bytes_max: int
    stalled_s: float  # how long writes waited, in all
    elapsed_s: float
    job_count: int
    sst_count: int
    requests: Requests
    bill: Bill  # of a month of this
    samples: Sequence[Sample]
