"""Rules that the SSTs of a manifest keep beside each other, as far as the manifest tells.

All checks report what they find and go on, where `Tree.of` stops at the first contradiction.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations, pairwise
from operator import attrgetter

from shalekv.core.tree import L0, SYSTEM_LEVEL, upper_bound
from shalekv.protocol.audit import Finding, FindingKind
from shalekv.protocol.manifest import Manifest
from shalekv.protocol.sst_table import SstInfo


def level_findings(name: str, manifest: Manifest) -> Iterator[Finding]:
    """What is wrong with the levels of the manifest, the object `name`."""
    by_level: dict[int, list[SstInfo]] = {}
    ids: set[bytes] = set()
    for info in manifest.leveled_ssts:
        by_level.setdefault(info.level, []).append(info)
        if info.id in ids:
            yield Finding(name, FindingKind.SST_ROW, f"SST {info.id.hex()} stands there twice")
        ids.add(info.id)
        for problem in _contradictions(info, manifest):
            yield Finding(name, FindingKind.SST_ROW, f"SST {info.id.hex()}: {problem}")
    for level, ssts in sorted(by_level.items()):
        if level not in (L0, SYSTEM_LEVEL):
            yield from _overlaps(name, level, ssts)
    yield from _shared_numbers(name, by_level.get(L0, ()))


def _contradictions(info: SstInfo, manifest: Manifest) -> Iterator[str]:
    """What is wrong with one row of the table."""
    if info.level > SYSTEM_LEVEL:
        yield f"there is no level {info.level}"
    if info.last_key and info.first_key > info.last_key:
        yield "its first key is above its last key"
    if info.min_seq > info.max_seq:
        yield f"its sequence numbers go from {info.min_seq} to {info.max_seq}"
    if info.max_seq > manifest.last_compacted_seq:
        yield (
            f"its sequence numbers reach {info.max_seq}, and last_compacted_seq is "
            f"{manifest.last_compacted_seq}"
        )
    if info.tombstone_count > info.entry_count:
        yield f"{info.tombstone_count} of its {info.entry_count} entries are tombstones"
    if info.entry_count == 0:
        yield "it has no entries"
    ends = (info.filter_offset + info.filter_len, info.block_meta_offset + info.block_meta_len)
    if ends[0] > info.block_meta_offset or ends[1] > info.size_bytes:
        yield f"its parts do not fit an object of {info.size_bytes} bytes"


def _overlaps(name: str, level: int, ssts: Sequence[SstInfo]) -> Iterator[Finding]:
    """The same rule as `SortedRun.of`: neighbours may share a bound, and nothing else."""
    for before, after in pairwise(sorted(ssts, key=attrgetter("first_key"))):
        if _overlap(before, after):
            problem = f"level {level}: SSTs {before.id.hex()} and {after.id.hex()} overlap"
            yield Finding(name, FindingKind.LEVEL_OVERLAP, problem)


def _shared_numbers(name: str, ssts: Sequence[SstInfo]) -> Iterator[Finding]:
    """Pairs of L0 whose keys overlap, and whose sequence numbers do: neither is the newer one."""
    ordered = sorted(ssts, key=lambda info: info.min_seq)
    reach = 0
    is_disjoint = True
    for info in ordered:
        is_disjoint = is_disjoint and info.min_seq > reach
        reach = max(reach, info.max_seq)
    if is_disjoint:
        return  # as it should be; pairs are looked at only to say which
    for one, other in combinations(ordered, 2):
        if _overlap(one, other) and other.min_seq <= one.max_seq:
            problem = (
                f"level 0: SSTs {one.id.hex()} and {other.id.hex()} overlap, and so do their "
                "sequence numbers: neither is the newer one"
            )
            yield Finding(name, FindingKind.LEVEL_SEQUENCE, problem)


def _overlap(one: SstInfo, other: SstInfo) -> bool:
    """Whether they share more than a bound."""
    low, high = sorted((one, other), key=attrgetter("first_key"))
    return upper_bound(low) > high.first_key or low.first_key == high.first_key
