"""Range jobs: merges of all levels within a range of keys down into the last level. Pure.

No entry may go below an older version of its key. So every SST that overlaps the range, or an SST
that was taken before, is taken, from the newest source to the oldest. Then no SST that is left
holds older versions of the keys that are merged, and no dropped tombstone uncovers anything.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from shalekv.protocol.compaction.l0 import l0_sources
from shalekv.protocol.compaction.policy import LAST_LEVEL
from shalekv.protocol.entry import END_OF_KEYS, NO_EXPIRY, KeyRange
from shalekv.protocol.manifest import Version, overlaps, upper_bound
from shalekv.protocol.sst_table import SstInfo


@dataclass(frozen=True, slots=True)
class RangeJob:
    """Merge `sources` into `target_level`, below which there is no data.

    Each source is a run of SSTs by key. For every key, its entries are newer than those of later
    sources.
    """

    sources: Sequence[Sequence[SstInfo]]
    target_level: int

    @property
    def inputs(self) -> Sequence[SstInfo]:
        """All SSTs that the job replaces."""
        return [info for source in self.sources for info in source]

    @property
    def input_bytes(self) -> int:
        """The bytes that the job reads."""
        return sum(info.size_bytes for info in self.inputs)


@dataclass(frozen=True, slots=True)
class RangeResult:
    """The result of a range job."""

    job: RangeJob
    outputs: Sequence[SstInfo]


def pick_range(version: Version, keys: KeyRange, *, reserved_seq: int) -> RangeJob | None:
    """Return the job for these keys; None if the levels hold nothing of them.

    Entries above `reserved_seq` are left to compactors, unless they are in an SST that overlaps one
    of the job.
    """
    last = max([LAST_LEVEL, *(run.level for run in version.runs)])
    taken: KeyRange | None = None  # the range of all that is taken; gaps in it are within `keys`
    sources: list[Sequence[SstInfo]] = []
    for source in _newest_first(version):
        found = []
        for info in source:
            is_bound = taken is not None and overlaps(info, taken)
            if is_bound or (info.min_seq <= reserved_seq and overlaps(info, keys)):
                found.append(info)
        for info in found:
            taken = _with(taken, info)
        if found:
            sources.append(found)
    return RangeJob(sources, last) if sources else None


def is_merged(job: RangeJob, horizon_ms: int) -> bool:
    """Return whether the job would have no effect: all inputs are in the last level, with nothing
    to drop.

    `horizon_ms` is the logical time up to which expired values are dropped.
    """
    return all(
        info.level == job.target_level
        and not info.tombstone_count
        and not NO_EXPIRY < info.first_expiry_ms <= horizon_ms
        for info in job.inputs
    )


def _newest_first(version: Version) -> Iterator[Sequence[SstInfo]]:
    """Iterate over the sources of the version; the SSTs of one load or job in L0 are one source."""
    yield from l0_sources(version.l0)
    for run in version.runs:
        yield run.ssts


def _with(keys: KeyRange | None, info: SstInfo) -> KeyRange:
    """Return the range of the keys and those of the SST."""
    bound = upper_bound(info)
    end = b"" if bound == END_OF_KEYS else bound + b"\x00"
    if keys is None:
        return KeyRange(info.first_key, end)
    end = max(keys.end, end) if keys.end and end else b""
    return KeyRange(min(keys.start, info.first_key), end)
