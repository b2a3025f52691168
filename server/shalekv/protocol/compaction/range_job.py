"""A job that merges a whole range of keys: everything of all levels, down into the last. Pure.

Of what the range touches, nothing may go below what is older than it. So from the newest source to
the oldest, every SST is taken that overlaps the range or an SST taken before: what is taken then
has nothing older beside it, and no tombstone of it hides anything that is left.
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
    """Merge `sources` into `target_level`, below which there is nothing.

    Each source is a run of SSTs by key; what stands in one is newer than all of it in later ones.
    """

    sources: Sequence[Sequence[SstInfo]]
    target_level: int

    @property
    def inputs(self) -> Sequence[SstInfo]:
        """Everything that the job replaces."""
        return [info for source in self.sources for info in source]

    @property
    def input_bytes(self) -> int:
        """What it reads."""
        return sum(info.size_bytes for info in self.inputs)


@dataclass(frozen=True, slots=True)
class RangeResult:
    """What became of it."""

    job: RangeJob
    outputs: Sequence[SstInfo]


def pick_range(tree: Version, keys: KeyRange, *, reserved_seq: int) -> RangeJob | None:
    """The job for these keys; None: the levels hold nothing of them.

    What came after `reserved_seq` is left to compactors, unless it has to come along.
    """
    last = max([LAST_LEVEL, *(run.level for run in tree.runs)])
    taken: KeyRange | None = None  # from end to end: it has no gap but in `keys`
    sources: list[Sequence[SstInfo]] = []
    for source in _newest_first(tree):
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
    """Whether the job would drop nothing: all is in the last level, without anything to drop.

    `horizon_ms` is the logical time until which expired values go.
    """
    return all(
        info.level == job.target_level
        and not info.tombstone_count
        and not NO_EXPIRY < info.first_expiry_ms <= horizon_ms
        for info in job.inputs
    )


def _newest_first(tree: Version) -> Iterator[Sequence[SstInfo]]:
    """The sources of the tree, what one load or job has put into L0 as one."""
    yield from l0_sources(tree.l0)
    for run in tree.runs:
        yield run.ssts


def _with(keys: KeyRange | None, info: SstInfo) -> KeyRange:
    """The keys, and those of the SST."""
    bound = upper_bound(info)
    end = b"" if bound == END_OF_KEYS else bound + b"\x00"
    if keys is None:
        return KeyRange(info.first_key, end)
    end = max(keys.end, end) if keys.end and end else b""
    return KeyRange(min(keys.start, info.first_key), end)
