"""What a local store told anybody survives a power cut, and each sync is there for a reason."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest

from shalekv.store.api import Unknown
from shalekv.store.filesystem import FileSystem
from shalekv.store.local import LocalStore
from tests.kit.disks.careless import MUTANTS, ForwardingFileSystem, WithoutSecondLinks
from tests.kit.disks.crashing import CrashingDisk
from tests.kit.inline_runtime import finish, gathered, inline_runtime
from tests.unit.store.power_cut_trial import ROOT, power_cut
from tests.unit.store.turnstile import PowerCut

SEEDS = range(1_000)


def test_what_was_told_survives() -> None:
    """After a power cut, acknowledged objects are there and whole, and no half object is."""
    for seed in SEEDS:
        problems = power_cut(seed, ForwardingFileSystem)
        assert not problems, f"seed {seed}: {problems}"


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_what_was_told_survives_many_power_cuts() -> None:
    """As above, for many more seeds."""
    for seed in range(SEEDS.stop, 50 * SEEDS.stop):
        problems = power_cut(seed, ForwardingFileSystem)
        assert not problems, f"seed {seed}: {problems}"


def test_a_seed_repeats_itself() -> None:
    """The same seed finds the same problems, so that a failure can be looked into."""
    for seed in SEEDS[:50]:
        assert power_cut(seed, MUTANTS[0]) == power_cut(seed, MUTANTS[0]), f"seed {seed}"


@pytest.mark.parametrize("careless", MUTANTS)
def test_every_sync_is_needed(careless: Callable[[FileSystem], FileSystem]) -> None:
    """A store that leaves out one of its syncs breaks a promise, and the trial notices."""
    assert any(power_cut(seed, careless) for seed in SEEDS)


class Killer:
    """Kills the process that makes calls to a disk after its first one called `fatal`."""

    def __init__(self) -> None:
        self.fatal = ""
        self._previous = ""

    def __call__(self, call: str) -> None:
        """What a disk does before each call."""
        if self.fatal and self._previous == self.fatal:
            raise PowerCut
        self._previous = call


@pytest.mark.parametrize("seed", range(20))
def test_removing_a_temporary_name_keeps_its_object(seed: int) -> None:
    """A collector that removes the temporary name of an object first makes the object durable.

    Else the object would look durable, and be read, and be gone after a power cut.
    """
    killer = Killer()
    disk = CrashingDisk(killer)
    # This one sees no second link, as if it had listed the folder right before the link.
    store = LocalStore(ROOT, inline_runtime(seed), filesystem=WithoutSecondLinks(disk))
    killer.fatal = "link"
    with pytest.raises(PowerCut):
        finish(store.create("wal/1", b"first"))
    killer.fatal = ""
    shown, temporary = (info.name for info in finish(gathered(store.list("wal/"))))
    killer.fatal = "unlink"
    with pytest.raises(PowerCut):
        finish(store.delete([temporary]))
    killer.fatal = ""
    assert finish(store.get(shown)).data == b"first"
    after = LocalStore(ROOT, inline_runtime(), filesystem=disk.after_cut(Random(seed)))
    assert finish(after.get(shown)).data == b"first"


class LinksWithoutAnswer(ForwardingFileSystem):
    """A file system, as over a network, that makes links and loses the reply."""

    def link(self, existing: Path, new: Path) -> None:
        super().link(existing, new)
        raise OSError(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT))


@pytest.mark.parametrize("seed", range(20))
def test_an_unknown_object_is_made_durable_by_its_reader(seed: int) -> None:
    """An object that an unknown outcome left behind survives a power cut once it was read."""
    disk = CrashingDisk()
    store = LocalStore(ROOT, inline_runtime(seed), filesystem=LinksWithoutAnswer(disk))
    assert isinstance(finish(store.create("wal/1", b"ours")), Unknown)
    assert finish(store.get("wal/1")).data == b"ours"
    after = LocalStore(ROOT, inline_runtime(), filesystem=disk.after_cut(Random(seed)))
    assert finish(after.get("wal/1")).data == b"ours"
