"""What a job over a range of keys will do, or has done, in numbers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from operator import attrgetter

from shalekv.core.key_range import KeyRange
from shalekv.protocol.compaction.range_job import RangeJob, RangeResult
from shalekv.protocol.sst_table import SstInfo

_MIB = 1024 * 1024


@dataclass(frozen=True, slots=True)
class LevelInputs:
    """The SSTs of one level that are merged."""

    level: int
    ssts: int
    size_bytes: int
    rows: int  # tombstones and older versions included
    tombstones: int

    @classmethod
    def of(cls, level: int, infos: Iterable[SstInfo]) -> LevelInputs:
        """The sums of these SSTs."""
        listed = list(infos)
        return cls(
            level,
            len(listed),
            sum(info.size_bytes for info in listed),
            sum(info.entry_count for info in listed),
            sum(info.tombstone_count for info in listed),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class CompactionReport:
    """What a compaction of a range of keys has done; of a dry run, what it would do.

    `inputs` are the SSTs that it replaces, by level from the newest on. Numbers of outputs are 0 in
    a dry run, and where there was nothing to do. `seq`: the levels held all up to it that was
    merged. `wal_objects` are those that were not in the levels yet, and so were left alone.
    """

    url: str
    keys: KeyRange
    is_dry_run: bool
    is_done: bool  # False: a dry run, or there was nothing to do
    target_level: int
    inputs: Sequence[LevelInputs] = field(default=())
    parts: int = 0
    output_ssts: int = 0
    output_bytes: int = 0
    output_rows: int = 0
    output_tombstones: int = 0
    read_bytes: int = 0
    written_bytes: int = 0
    epoch: int = 0  # of the compactor beside which it ran
    seq: int = 0
    manifest_id: int = 0  # that was planned for; of a compaction that is done, that has the outputs
    wal_objects: int = 0

    @property
    def input_ssts(self) -> int:
        """How many SSTs of all levels are replaced."""
        return sum(level.ssts for level in self.inputs)

    @property
    def input_bytes(self) -> int:
        """What they take in the store."""
        return sum(level.size_bytes for level in self.inputs)

    @property
    def input_rows(self) -> int:
        """Their rows, tombstones and older versions included."""
        return sum(level.rows for level in self.inputs)

    @property
    def dropped_rows(self) -> int:
        """Rows that nobody can read any more, tombstones included."""
        return self.input_rows - self.output_rows if self.is_done else 0

    @property
    def dropped_tombstones(self) -> int:
        """Tombstones, of keys and of ranges, that delete nothing any more."""
        found = sum(level.tombstones for level in self.inputs)
        return found - self.output_tombstones if self.is_done else 0

    def __str__(self) -> str:
        """For people: a line for each level, and one for what comes of them."""
        start, end = (repr(key)[1:] if key else "the end" for key in self.keys)
        lines = [f"{self.url}: keys from {start if self.keys.start else 'the first'} to {end}"]
        lines += [
            f"  L{each.level}: {each.ssts} SSTs, {each.size_bytes / _MIB:.1f} MiB, "
            f"{each.rows} rows, {each.tombstones} tombstones"
            for each in self.inputs
        ]
        if self.is_done:
            lines.append(
                f"  became {self.output_ssts} SSTs of L{self.target_level}, "
                f"{self.output_bytes / _MIB:.1f} MiB, {self.output_rows} rows: {self.dropped_rows} "
                f"rows dropped, {self.dropped_tombstones} tombstones among them"
            )
        elif self.is_dry_run and self.parts:
            lines.append(f"  would be merged into L{self.target_level}, in {self.parts} parts")
        else:
            lines.append("  nothing to do")
        if self.wal_objects:
            lines.append(f"  left alone: {self.wal_objects} WAL objects that are not compacted yet")
        return "\n".join(lines)


def inputs_of(job: RangeJob | None) -> Sequence[LevelInputs]:
    """The inputs by level, L0 first."""
    infos = sorted(job.inputs, key=attrgetter("level")) if job is not None else ()
    return [LevelInputs.of(level, each) for level, each in groupby(infos, attrgetter("level"))]


def outputs_of(result: RangeResult) -> LevelInputs:
    """The sums of the outputs."""
    return LevelInputs.of(result.job.target_level, result.outputs)
