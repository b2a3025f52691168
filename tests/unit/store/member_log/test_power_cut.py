"""What a log told anybody survives power cuts and kills, and each sync is there for a reason."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from shalekv.store.filesystem import FileSystem
from tests.kit.disks.careless import ForwardingFileSystem
from tests.unit.store.member_log.power_trial import Trial

SEEDS = range(600)
SMALL_FILES = frozenset({"control", "synced"})


class WithoutSegmentSync(ForwardingFileSystem):
    """Leaves out the sync of records."""

    def sync_data(self, descriptor: int) -> None:
        if self.open_files[descriptor].name in SMALL_FILES:
            super().sync_data(descriptor)


class WithoutControlSync(ForwardingFileSystem):
    """Leaves out the sync of the promise."""

    def sync_data(self, descriptor: int) -> None:
        if self.open_files[descriptor].name != "control":
            super().sync_data(descriptor)


class WithoutBoundSync(ForwardingFileSystem):
    """Leaves out the sync of a bound that was lowered."""

    def sync_data(self, descriptor: int) -> None:
        if self.open_files[descriptor].name != "synced":
            super().sync_data(descriptor)


class WithoutFolderSync(ForwardingFileSystem):
    """Leaves out the sync of the names of segments."""

    def fsync(self, descriptor: int) -> None:
        if self.open_folders[descriptor].name != "member":
            super().fsync(descriptor)


MUTANTS = (WithoutSegmentSync, WithoutControlSync, WithoutBoundSync, WithoutFolderSync)


def test_what_was_told_survives() -> None:
    """Durable records and promises are there after a cut, and none that was cut off returns."""
    for seed in SEEDS:
        problems = Trial(seed, ForwardingFileSystem).run()
        assert not problems, f"seed {seed}: {problems}"


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_what_was_told_survives_many_power_cuts() -> None:
    """As above, for many more seeds."""
    for seed in range(SEEDS.stop, 100 * SEEDS.stop):
        problems = Trial(seed, ForwardingFileSystem).run()
        assert not problems, f"seed {seed}: {problems}"


@pytest.mark.parametrize("careless", MUTANTS)
def test_every_sync_is_needed(careless: Callable[[FileSystem], FileSystem]) -> None:
    """A log that leaves out one of its syncs breaks a promise, and the trial notices."""
    assert any(Trial(seed, careless).run() for seed in SEEDS)
