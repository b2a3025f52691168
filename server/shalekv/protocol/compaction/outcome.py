"""Values of `compaction.simulate`: the setup of a simulation, its results, and its cost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields

from shalekv.protocol.compaction.l0 import SourceChoice
from shalekv.settings.jobs import CompactorSettings
from shalekv.settings.model import GIB, KIB, MIB
from shalekv.settings.store import LevelSettings

_REQUESTS = 1_000  # number of requests to which a price applies
MONTH_S = 30 * 86_400


@dataclass(frozen=True, slots=True, kw_only=True)
class Prices:
    """Prices in US dollars. The defaults are those of S3 Standard in us-east-1."""

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
        """Add the other counts, `times` times."""
        for kind in fields(self):
            total = getattr(self, kind.name) + times * getattr(other, kind.name)
            setattr(self, kind.name, total)


# An edit of the manifest creates the next one between two lists; rule F2 asks for the second.
EDIT = SimulatedRequests(put=1, list=2)


@dataclass(frozen=True, slots=True)
class Bill:
    """The cost of a month in US dollars."""

    requests_usd: float
    storage_usd: float


def monthly_bill(
    requests: SimulatedRequests, *, elapsed_s: float, stored_bytes: float, prices: Prices
) -> Bill:
    """Return the bill of a month that is like the `elapsed_s` in which `requests` were sent."""
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """The settings and the machine on which a workload is simulated."""

    compactor: CompactorSettings = field(default_factory=CompactorSettings)
    levels: LevelSettings = field(default_factory=LevelSettings)
    choice: SourceChoice = SourceChoice.SMALLEST_OVERLAP
    flush_interval_ms: int = 50
    flush_bytes: int = 4 * MIB
    wal_block_bytes: int = 64 * KIB
    uncompacted_bytes_max: int = 1 * GIB  # beyond it writes wait
    compaction_bytes_per_s: float = 60_000_000.0  # input of compactions, read and rewritten
    job_s: float = 0.3  # the fixed time of a job, for edits of the manifest
    request_bytes: int = 1 * MIB  # bytes of an SST that one request of a compaction reads
    collect_age_s: float = 300.0  # the time for which replaced SSTs are kept
    prices: Prices = field(default_factory=Prices)


@dataclass(frozen=True, slots=True)
class Amplification:
    """Amplification by the levels and the WAL.

    `write`: bytes of all WAL objects and SSTs ever written, per byte that clients wrote.
    `space`: bytes of the SSTs at the end, when no compaction is due, per byte of live keys and
    values. `space_max`: its maximum in the second half of the workload, the WAL after c included.
    `read`: number of SSTs whose range contains the key of a read, on average while writing.
    """

    write: float
    read: float
    space: float
    space_max: float


@dataclass(frozen=True, slots=True)
class Sample:
    """The state at one time of the simulation."""

    elapsed_s: float
    live_bytes: int
    wal_bytes: int
    l0_count: int
    level_bytes: Mapping[int, int]
    read: float
    space: float


@dataclass(frozen=True, slots=True)
class Simulated:
    """The result of a simulation."""

    amplification: Amplification
    scan_blocks: float  # blocks that a scan reads, on average
    l0_count_max: int
    wal_bytes_max: int
    stalled_s: float  # total time for which writes waited
    elapsed_s: float
    job_count: int
    sst_count: int
    requests: SimulatedRequests
    bill: Bill  # of a month of this workload
    samples: Sequence[Sample]
