"""What a collection is going to do, and what it has done."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from shalekv.core.collectable import Folder, Listed, Reason, Verdict
from shalekv.protocol.manifest import Manifest


@dataclass(frozen=True, slots=True)
class Judged:
    """One object, and what becomes of it."""

    listed: Listed
    verdict: Verdict


@dataclass(frozen=True, slots=True)
class Plan:
    """All objects that were listed, and what becomes of each, in the order of deletion."""

    manifest: Manifest  # the one that judges
    is_edit_needed: bool  # the collector has to publish it first
    dropped_snapshots: int  # by that edit: they have expired
    dropped_leases: int
    objects: Sequence[Judged]

    @property
    def doomed(self) -> Iterable[Listed]:
        """What goes."""
        return (each.listed for each in self.objects if each.verdict.goes)


@dataclass(frozen=True, slots=True)
class Amount:
    """How much there is of something."""

    objects: int = 0
    size_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Report:
    """What a collection has done, or would do."""

    manifest_id: int  # of the manifest that judged
    is_edited: bool  # whether the collector has made it
    dropped_snapshots: int
    dropped_leases: int
    deleted: Mapping[Folder, Amount]  # a folder in which nothing is deleted is not there
    kept: Mapping[tuple[Folder, Reason], Amount]

    @classmethod
    def on(cls, plan: Plan) -> Report:
        """The report when all is done that `plan` says."""
        deleted: dict[Folder, list[int]] = {}  # sizes
        kept: dict[tuple[Folder, Reason], list[int]] = {}
        for judged in plan.objects:
            listed, verdict = judged.listed, judged.verdict
            if verdict.goes:
                deleted.setdefault(listed.folder, []).append(listed.size_bytes)
            else:
                kept.setdefault((listed.folder, verdict.reason), []).append(listed.size_bytes)
        return cls(
            manifest_id=plan.manifest.manifest_id,
            is_edited=plan.is_edit_needed,
            dropped_snapshots=plan.dropped_snapshots,
            dropped_leases=plan.dropped_leases,
            deleted={folder: Amount(len(sizes), sum(sizes)) for folder, sizes in deleted.items()},
            kept={why: Amount(len(sizes), sum(sizes)) for why, sizes in kept.items()},
        )

    @property
    def deleted_objects(self) -> int:
        """In all folders."""
        return sum(amount.objects for amount in self.deleted.values())

    @property
    def deleted_bytes(self) -> int:
        """In all folders."""
        return sum(amount.size_bytes for amount in self.deleted.values())

    @property
    def kept_objects(self) -> Mapping[str, int]:
        """How many objects each reason keeps, in all folders."""
        found: dict[str, int] = {}
        for (_, reason), amount in self.kept.items():
            found[reason.value] = found.get(reason.value, 0) + amount.objects
        return found
