"""A local store keeps through a power cut what it has reported, and each of its syncs is needed."""

from __future__ import annotations

import errno
import os
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

import pytest

from shalekv.errors import ObjectNotFound
from shalekv.store.api import TEMP_SUFFIX, Created, Exists, Unknown
from shalekv.store.files import FileSystem
from shalekv.store.local import LocalStore
from tests.kit.disks.careless import MUTANTS, ForwardingFileSystem, WithoutSecondLinks
from tests.kit.disks.crashing import CrashingDisk
from tests.kit.inline_runtime import finish, gathered, inline_runtime
from tests.kit.seeds import run_seed

CUTS, CUTS_OF_SOAK = 400, 50_000
CUTS_OF_MUTANTS = 2_000  # most of which are not needed
ROOT = Path("/srv/data/db")
FOLDERS = ("wal/", "levels/")
CONTESTED = ("wal/0", "wal/1", "levels/0")
KINDS = ("create", "own", "get", "list", "delete")
ALL, RACER, READER = (6, 2, 2, 1, 4), (1, 0, 0, 0, 0), (0, 0, 3, 1, 0)  # weights of kinds
PROCESSES_MAX = 3
CALLS_MAX = 4
READS_MAX = 30  # they are short
STEPS_TO_CUT_MAX = 600
BODY_REPEATS_MAX = 20
# Probabilities that the last thread continues: from a fine interleaving to long runs of one thread.
SAME_AGAIN = (0.4, 0.8, 0.9)
# Share of threads that are killed early, and the calls after which: they leave work half done.
KILLED = 0.6
FATAL_CALLS = ("mkdir", "fsync", "link", "link", "link")


class PowerCut(Exception):
    """Ends a program at its next step: it was killed, or the machine lost power."""


@dataclass(slots=True, eq=False)
class _Runner:
    program: Callable[[], None]
    fatal_call: str | None  # it is killed after the first of these
    previous_call: str = ""
    turn: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    error: BaseException | None = None
    done: bool = False


class Turnstile:
    """Runs programs that call `step` before each action that others can see."""

    def __init__(self, random: Random, steps_to_cut: int) -> None:
        self._random = random
        self._same_again = random.choice(SAME_AGAIN)
        self._steps_left = steps_to_cut
        self._current: _Runner | None = None
        self._back = threading.Semaphore(0)

    def step(self, call: str) -> None:
        """Wait for a turn to make this call; raises `PowerCut` when there is none any more."""
        runner = self._current
        if runner is None:
            return  # before and after the programs, to prepare and to inspect
        self._back.release()
        runner.turn.acquire()
        if self._steps_left <= 0 or runner.previous_call == runner.fatal_call:
            raise PowerCut
        runner.previous_call = call
        self._steps_left -= 1

    def run(self, programs: Sequence[Callable[[], None]]) -> None:
        """Run all programs to their end or to the cut; raise any other error of theirs."""
        runners = [self._runner(program) for program in programs]
        threads = [threading.Thread(target=self._run_one, args=(at,)) for at in runners]
        for thread in threads:
            thread.start()
        while alive := [runner for runner in runners if not runner.done]:
            if self._current not in alive or self._random.random() > self._same_again:
                self._current = self._random.choice(alive)
            assert self._current is not None
            self._current.turn.release()
            self._back.acquire()
        self._current = None
        for thread in threads:
            thread.join()
        for runner in runners:
            if runner.error is not None:
                raise runner.error

    def _runner(self, program: Callable[[], None]) -> _Runner:
        killed = self._random.random() < KILLED
        return _Runner(program, self._random.choice(FATAL_CALLS) if killed else None)

    def _run_one(self, runner: _Runner) -> None:
        runner.turn.acquire()
        try:
            runner.program()
        except PowerCut:
            pass
        except BaseException as error:  # noqa: BLE001  (raised again by `run`)
            runner.error = error
        finally:
            runner.done = True
            self._back.release()


@dataclass(slots=True)
class Known:
    """Knowledge that the processes have from replies."""

    attempted: dict[str, set[bytes]] = field(default_factory=lambda: defaultdict(set))
    created: Counter[str] = field(default_factory=Counter)
    present: dict[str, set[bytes]] = field(default_factory=lambda: defaultdict(set))
    doomed: set[str] = field(default_factory=set)  # a delete was begun
    deleted: set[str] = field(default_factory=set)  # ... and ended


def power_cut(number: int, wrap: Callable[[FileSystem], FileSystem]) -> list[str]:
    """Run processes into a power cut; return each contradiction to what they know, in words.

    `wrap` is put between each process and the disk.
    """
    seed = f"{run_seed()}/{number}"
    random = Random(seed)
    turnstile = Turnstile(random, random.randint(1, STEPS_TO_CUT_MAX))
    disk = CrashingDisk(turnstile.step)
    disk.mkdir(ROOT.parents[1])
    disk.fsync(disk.open_folder(ROOT.parents[2]))
    known = Known()
    names = random.sample(CONTESTED, random.randint(1, len(CONTESTED)))

    def process(number: int) -> Callable[[], None]:
        runtime = inline_runtime(f"{seed}/{number}")
        store = LocalStore(ROOT, runtime, filesystem=wrap(disk))
        own = f"process {number}"
        return lambda: _work(store, known, Random(f"{seed}/{number}/work"), own, names)

    turnstile.run([process(number) for number in range(random.randint(2, PROCESSES_MAX))])
    return list(
        _problems(LocalStore(ROOT, inline_runtime(), filesystem=disk.after_cut(random)), known)
    )


def _work(store: LocalStore, known: Known, random: Random, own: str, names: list[str]) -> None:
    weights = random.choice((ALL, RACER, READER))
    calls_max = READS_MAX if weights == READER else CALLS_MAX
    for number in range(random.randint(1, calls_max)):
        kind = random.choices(KINDS, weights)[0]
        name = random.choice(names)
        if kind == "create":
            _create(
                store,
                known,
                name,
                f"{own} {number};".encode() * random.randint(1, BODY_REPEATS_MAX),
            )
        elif kind == "own":
            _create(store, known, f"levels/{own} {number}", own.encode())
        elif kind == "get":
            _get(store, known, name)
        elif kind == "list":
            _list(store, known, random.choice(FOLDERS))
        else:
            _delete(store, known, own)


def _create(store: LocalStore, known: Known, name: str, body: bytes) -> None:
    known.attempted[name].add(body)
    outcome = finish(store.create(name, body))
    if outcome == Created():
        known.created[name] += 1
        known.present[name].add(body)
    elif outcome == Exists():
        known.present[name] |= set()


def _get(store: LocalStore, known: Known, name: str) -> None:
    try:
        found = finish(store.get(name))
    except ObjectNotFound:
        return
    known.present[name].add(found.data)


def _list(store: LocalStore, known: Known, folder: str) -> None:
    for info in finish(gathered(store.list(folder))):
        if not info.name.endswith(TEMP_SUFFIX):
            known.present[info.name] |= set()


def _delete(store: LocalStore, known: Known, own: str) -> None:
    mine = sorted(name for name in known.created if own in name and name not in known.doomed)
    known.doomed.update(mine)
    finish(store.delete(mine))
    known.deleted.update(mine)


def _problems(store: LocalStore, known: Known) -> list[str]:
    problems = [f"{name} was created {n} times" for name, n in known.created.items() if n > 1]
    shown = {info.name for folder in FOLDERS for info in finish(gathered(store.list(folder)))}
    unfinished = {name for name in shown if name.endswith(TEMP_SUFFIX)}
    found = {name: finish(store.get(name)).data for name in shown - unfinished}
    for name, body in found.items():
        if body not in known.attempted[name]:
            problems.append(f"{name} is half an object: {body!r}")
        if name in known.deleted:
            problems.append(f"{name} is back after it was deleted")
    for name, bodies in known.present.items():
        if name not in found and name not in known.doomed:
            problems.append(f"{name} is gone")
        if name in found and bodies - {found[name]}:
            problems.append(f"{name} has changed")
    finish(store.delete(unfinished))
    for name in CONTESTED:
        outcome = finish(store.create(name, b"after"))
        if outcome != (Exists() if name in found else Created()):
            problems.append(f"{name} cannot be created afterwards")
    return problems


@pytest.mark.parametrize("first", [0, pytest.param(CUTS, marks=pytest.mark.soak)])
@pytest.mark.timeout(600)
def test_what_was_acknowledged_survives(first: int) -> None:
    """After a power cut, acknowledged objects exist and are whole, and no half object exists."""
    for number in range(first, CUTS_OF_SOAK if first else CUTS):
        problems = power_cut(number, ForwardingFileSystem)
        assert not problems, f"cut {number}: {problems}"


@pytest.mark.parametrize("omitted", MUTANTS)
def test_every_sync_is_needed(omitted: str) -> None:
    """A store without one of its syncs breaks a guarantee, and the trial notices."""
    assert any(power_cut(number, MUTANTS[omitted]) for number in range(CUTS_OF_MUTANTS))


class Killer:
    """Kills the process that makes calls to a disk after its first call named `fatal`."""

    def __init__(self) -> None:
        self.fatal = ""
        self._previous = ""

    def __call__(self, call: str) -> None:
        if self.fatal and self._previous == self.fatal:
            raise PowerCut
        self._previous = call


@pytest.mark.parametrize("seed", range(5))
def test_removing_a_temporary_name_keeps_its_object(seed: int) -> None:
    """A collector that removes the temporary name of an object makes the object durable first.

    Otherwise the object would look durable, be read, and be gone after a power cut.
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


@pytest.mark.parametrize("seed", range(5))
def test_an_unknown_object_is_made_durable_by_its_reader(seed: int) -> None:
    """An object of a create with an unknown outcome survives a power cut once it was read."""
    disk = CrashingDisk()
    store = LocalStore(ROOT, inline_runtime(seed), filesystem=LinksWithoutAnswer(disk))
    assert isinstance(finish(store.create("wal/1", b"ours")), Unknown)
    assert finish(store.get("wal/1")).data == b"ours"
    after = LocalStore(ROOT, inline_runtime(), filesystem=disk.after_cut(Random(seed)))
    assert finish(after.get("wal/1")).data == b"ours"
