"""Which settings a simulation compares: the defaults, and one setting at a time changed."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import click
from pydantic import ValidationError

from shalekv.core.compaction.window import SourceChoice
from shalekv.protocol.compaction.outcome import Setup, Simulated
from shalekv.protocol.compaction.simulate import simulate as run_simulation
from shalekv.protocol.compaction.workload import Workload
from shalekv.settings.model import GIB, KIB, MIB

DEFAULTS = "defaults"
COLUMNS = (
    "workload",
    "setting",
    "write_amp",
    "read_amp",
    "space_amp",
    "space_amp_max",
    "l0_max",
    "wal_max_mib",
    "ssts",
    "jobs",
    "stalled_s",
    "requests_usd",
    "storage_usd",
)
_SIZE = re.compile(r"(\d{1,15})(B|KiB|MiB|GiB)", re.ASCII)
_UNITS = {"B": 1, "KiB": KIB, "MiB": MIB, "GiB": GIB}


@dataclass(frozen=True, slots=True)
class Variation:
    """One setting that is not the default, by the name that a row shows."""

    label: str
    setup: Setup


@dataclass(frozen=True, slots=True)
class Row:
    """One simulation."""

    workload: str
    setting: str
    simulated: Simulated

    @property
    def cells(self) -> tuple[str | int | float, ...]:
        """The cells of `COLUMNS`."""
        found = self.simulated
        amplification = found.amplification
        return (
            self.workload,
            self.setting,
            round(amplification.write, 2),
            round(amplification.read, 2),
            round(amplification.space, 2),
            round(amplification.space_max, 2),
            found.l0_count_max,
            found.wal_bytes_max // MIB,
            found.sst_count,
            found.job_count,
            round(found.stalled_s),
            round(found.bill.requests_usd, 2),
            round(found.bill.storage_usd, 2),
        )


def size_bytes(text: str) -> int:
    """The bytes that `text` says, such as 64MiB; raises `ValueError`."""
    found = _SIZE.fullmatch(text)
    if found is None:
        raise ValueError(f"'{text}' is no size with a unit, such as 512KiB, 64MiB or 2GiB")
    return int(found.group(1)) * _UNITS[found.group(2)]


def variations(values: Mapping[str, Sequence[str]]) -> Iterator[Variation]:
    """The defaults, then each value of each setting alone. Raises `click.BadParameter`."""
    setup = Setup()
    yield Variation(DEFAULTS, setup)
    for name, texts in values.items():
        for text in texts:
            try:
                yield Variation(f"{name}={text}", _changed(setup, name, text))
            except ValidationError as error:
                raise click.BadParameter(f"{name}={text}: {error.errors()[0]['msg']}") from None
            except ValueError as error:
                raise click.BadParameter(str(error)) from None


def rows(workloads: Mapping[str, Workload], compared: Sequence[Variation]) -> Iterator[Row]:
    """Every variation under every workload, as each is done."""
    for name, workload in workloads.items():
        for variation in compared:
            yield Row(name, variation.label, run_simulation(workload, variation.setup))


def _changed(setup: Setup, name: str, text: str) -> Setup:
    if name == "source_choice":
        return replace(setup, choice=SourceChoice(text))
    value = size_bytes(text) if name.endswith("bytes") else int(text)
    if name in type(setup.levels).model_fields:
        levels = setup.levels.model_dump() | {name: value}
        return replace(setup, levels=type(setup.levels).model_validate(levels))
    compactor = setup.compactor.model_dump() | {name: value}
    return replace(setup, compactor=type(setup.compactor).model_validate(compactor))
