"""What a simulation is given beside the workload, and what it tells."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields

from shalekv.protocol.compaction.l0 import SourceChoice
from shalekv.settings.jobs import CompactorSettings
from shalekv.settings.model import GIB, KIB, MIB
from shalekv.settings.store import LevelSettings

# --- bill
# What a store charges: requests by kind, and bytes kept, times its prices.


_REQUESTS = 1_000  # prices are for so many
MONTH_S = 30 * 86_400


@dataclass(frozen=True, slots=True, kw_only=True)
class Prices:
    """US dollars. The defaults are what S3 Standard charges in us-east-1."""

    put_usd_per_1000: float = 0.005
    list_usd_per_1000: float = 0.005
    get_usd_per_1000: float = 0.0004
    delete_usd_per_1000: float = 0.0
    storage_usd_per_gib_month: float = 0.023


@dataclass(slots=True)
class SimulatedRequests:
    """Requests to the store, by kind."""

    put: float = 0.0
    get: float = 0.0
    list: float = 0.0
    delete: float = 0.0

    def add(self, other: SimulatedRequests, times: float = 1.0) -> None:
        """Count the other ones as well, so many times."""
        for kind in fields(self):
            total = getattr(self, kind.name) + times * getattr(other, kind.name)
            setattr(self, kind.name, total)


@dataclass(frozen=True, slots=True)
class Bill:
    """US dollars for a month of this."""

    requests_usd: float
    storage_usd: float


# An edit of the manifest creates the next one between two lists; rule F2 asks for the second.
EDIT = SimulatedRequests(put=1, list=2)


def monthly_bill(
    requests: SimulatedRequests, *, elapsed_s: float, stored_bytes: float, prices: Prices
) -> Bill:
    """The bill of a month that is like the `elapsed_s` in which `requests` were sent."""
    usd = (
        requests.put * prices.put_usd_per_1000
        + requests.list * prices.list_usd_per_1000
        + requests.get * prices.get_usd_per_1000
        + requests.delete * prices.delete_usd_per_1000
    ) / _REQUESTS
    return Bill(
        requests_usd=usd * MONTH_S / max(elapsed_s, 1e-9),
        storage_usd=stored_bytes / GIB * prices.storage_usd_per_gib_month,
    )


# --- outcome


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
    requests: SimulatedRequests
    bill: Bill  # of a month of this
    samples: Sequence[Sample]
