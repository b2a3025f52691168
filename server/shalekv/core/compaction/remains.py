"""What a merge may forget: only what nothing older can hold needs no tombstone (I2)."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from operator import attrgetter

from shalekv.core.tree import L0, SYSTEM_LEVEL, Tree, upper_bound
from shalekv.protocol.compaction.jobs import MergeJob
from shalekv.protocol.sst_table import SstInfo


@dataclass(frozen=True, slots=True)
class OlderKeys:
    """Closed intervals of the keys that SSTs below may hold, in order, without overlap."""

    firsts: Sequence[bytes] = ()
    lasts: Sequence[bytes] = ()  # `END_OF_KEYS`: no bound

    @classmethod
    def of(cls, ssts: Iterable[SstInfo]) -> OlderKeys:
        """The keys that these SSTs may hold."""
        firsts: list[bytes] = []
        lasts: list[bytes] = []
        for info in sorted(ssts, key=attrgetter("first_key")):
            if lasts and info.first_key <= lasts[-1]:
                lasts[-1] = max(lasts[-1], upper_bound(info))
            else:
                firsts.append(info.first_key)
                lasts.append(upper_bound(info))
        return cls(firsts, lasts)

    def may_hold(self, key: bytes) -> bool:
        """Whether a version of `key`, or a range tombstone over it, may be there."""
        at = bisect_left(self.lasts, key)
        return at < len(self.lasts) and self.firsts[at] <= key

    def may_hold_any(self, start: bytes, end: bytes) -> bool:
        """The same for the keys from `start` on, before `end` (`END_OF_KEYS`: no bound)."""
        at = bisect_left(self.lasts, start)
        return at < len(self.lasts) and self.firsts[at] < end


def older_ssts(tree: Tree, job: MergeJob) -> Collection[SstInfo]:
    """The SSTs that may hold older versions of what the job merges, and are not merged by it."""
    inputs = {info.id for info in job.inputs}
    newest = max((info.max_seq for info in job.sources), default=0)
    if job.source_level == SYSTEM_LEVEL:
        older = [info for info in tree.system if info.max_seq < newest]
    else:
        runs = [run for run in tree.runs if run.level > job.source_level]
        older = [info for run in runs for info in run.ssts]
        if job.source_level == L0:
            older += [info for info in tree.l0 if info.max_seq < newest]
    return [info for info in older if info.id not in inputs]
