"""A log keeps through power cuts what it has reported, and each of its syncs is needed."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import product
from random import Random

import pytest

from shalekv.errors import ShaleError
from shalekv.protocol.quorum.acceptor import Effect, Flush, Reset, Save, Truncate, Write
from shalekv.protocol.quorum_records import NO_BALLOT, Ballot, LogEnd, LogHealth, Record
from shalekv.store.files import FileSystem
from shalekv.store.safekeeper_log.log import MemberLog
from shalekv.store.safekeeper_log.slots import FILE_BYTES, SLOT_OFFSETS, SYNCED_NAME
from tests.kit.disks.careless import ForwardingFileSystem
from tests.kit.disks.member_logs import (
    FOLDER,
    PROMISE,
    RECORDS,
    SLOT_BYTES,
    held,
    new_disk,
    new_log,
    old_log,
    payloads,
    perform,
    records_after,
)
from tests.kit.seeds import random_of

CUTS = 250
CALLS_MAX = 1_000  # more than the life of the log below takes
LATER = Ballot(8, b"l" * 16)
OTHER = records_after(RECORDS[2].mark, payloads(3), epoch=2)
NEW_BASE = LogEnd(9, 2, 77, 9)
AFTER = records_after(NEW_BASE, payloads(2), epoch=3)


class Cut(BaseException):
    """The process ended in the middle of a call."""


@dataclass(frozen=True, slots=True)
class State:
    """Contents of a log: its chain begins at `start`, and any of `bases` may be found."""

    start: LogEnd
    records: tuple[Record, ...]
    promise: Ballot
    bases: tuple[LogEnd, ...]

    @classmethod
    def of(
        cls, records: tuple[Record, ...], promise: Ballot, trimmed: LogEnd | None = None
    ) -> State:
        return cls(LogEnd(), records, promise, (LogEnd(), trimmed or LogEnd()))


KEPT = (*RECORDS[:3], *OTHER)
# Steps that are taken in order, and the contents of the log after each.
LIFE: list[tuple[list[Effect] | LogEnd, State]] = [
    ([Write(RECORDS[:4]), Flush()], State.of(RECORDS[:4], NO_BALLOT)),
    ([Save(PROMISE, LogHealth.SOUND)], State.of(RECORDS[:4], PROMISE)),
    ([Write(RECORDS[4:6]), Flush()], State.of(RECORDS[:6], PROMISE)),
    ([Truncate(RECORDS[2].mark), Flush()], State.of(RECORDS[:3], PROMISE)),
    ([Write(OTHER), Flush()], State.of(KEPT, PROMISE)),
    ([Save(LATER, LogHealth.SOUND)], State.of(KEPT, LATER)),
    (OTHER[0].mark, State.of(KEPT, LATER, OTHER[0].mark)),
    ([Reset(NEW_BASE), Flush()], State(NEW_BASE, (), LATER, (NEW_BASE,))),
    ([Write(AFTER), Flush()], State(NEW_BASE, AFTER, LATER, (NEW_BASE,))),
]


def fits(log: MemberLog, before: State, after: State) -> bool:
    """Return whether the state that was found is that before a step, after it, or between them."""
    found, records = log.recovered, held(log)
    if found.health is not LogHealth.SOUND or found.promise not in {before.promise, after.promise}:
        return False
    shorter, longer = sorted((before, after), key=lambda state: len(state.records))
    choices = [(longer, len(shorter.records))]
    if before.start != after.start:
        choices = [(before, len(before.records)), (after, len(after.records))]
    for state, least in choices:
        chain = [each for each in state.records if each.lsn > found.log.base.lsn]
        skipped = len(state.records) - len(chain)
        is_prefix = records == chain[: len(records)] and len(records) >= least - skipped
        if found.log.base in {*before.bases, *after.bases} and is_prefix:
            return found.log.last.lsn == found.log.base.lsn + len(records)
    return False


def cut(random: Random, wrap: Callable[[FileSystem], FileSystem]) -> bool:
    """Cut the power at some call, then once more at the start; return whether all guarantees were
    kept.
    """
    disk, left = new_disk(), random.randrange(CALLS_MAX)

    def step(_call: str) -> None:
        nonlocal left
        left -= 1
        if left < 0:
            raise Cut

    log = new_log(FOLDER, filesystem=wrap(disk))
    before = after = State.of((), NO_BALLOT)
    disk.before_call = step
    try:
        for effects, after in LIFE:
            log.trim(effects) if isinstance(effects, LogEnd) else perform(log, effects)
            before = after
    except Cut:
        pass
    disk = disk.after_cut(random, step)
    left = random.choice((1, 10, 60))
    try:
        old_log(FOLDER, filesystem=wrap(disk))
    except Cut:
        disk = disk.after_cut(random)
    except (ShaleError, OSError):
        return False
    disk.before_call = lambda _: None
    try:
        log = old_log(FOLDER, filesystem=wrap(disk))
        again = old_log(FOLDER, filesystem=disk.after_cut(random))
    except (ShaleError, OSError):
        return False
    return fits(log, before, after) and again.recovered.log == log.recovered.log


def test_what_was_acknowledged_survives() -> None:
    """Durable records and promises exist after a power cut, and no truncated record returns."""
    for number in range(CUTS):
        assert cut(random_of(f"member log {number}"), ForwardingFileSystem), f"cut {number}"


class NotedBounds(ForwardingFileSystem):
    """Keeps the contents of the file `synced` since its last sync: a power cut may leave any of
    them.
    """

    versions: list[bytes]

    def __init__(self, inner: FileSystem) -> None:
        super().__init__(inner)
        self.versions = []

    def pwrite(self, descriptor: int, data: memoryview, offset: int) -> int:
        written = super().pwrite(descriptor, data, offset)
        self._note(descriptor)
        return written

    def sync_data(self, descriptor: int) -> None:
        super().sync_data(descriptor)
        if self.open_files[descriptor].name == SYNCED_NAME:
            self.versions.clear()
        self._note(descriptor)

    def _note(self, descriptor: int) -> None:
        if self.open_files[descriptor].name == SYNCED_NAME:
            self.versions.append(self.pread(descriptor, FILE_BYTES, 0))


def test_a_bound_that_was_not_synced_is_harmless() -> None:
    """The durable bound is not synced with the log. Whichever bound a power cut leaves, in either
    slot: it is not too high, and all records up to it are found.
    """
    disk = new_disk()
    noted = NotedBounds(disk)
    log = new_log(FOLDER, filesystem=noted)
    most = 0
    for effects, after in LIFE:
        log.trim(effects) if isinstance(effects, LogEnd) else perform(log, effects)
        slots = [{data[at : at + SLOT_BYTES] for data in noted.versions} for at in SLOT_OFFSETS]
        most = max(most, *map(len, slots))
        for first, second in product(*slots):
            left = copy.deepcopy(disk)
            left.bytes_of(FOLDER / SYNCED_NAME)[:] = first + second
            assert fits(old_log(FOLDER, filesystem=left), after, after), (after, first, second)
    assert most > 2  # a power cut could leave any of several bounds


class WithoutSync(ForwardingFileSystem):
    """Skips the syncs of the files or folders for which `omits` is true."""

    def __init__(self, inner: FileSystem, omits: Callable[[str], bool]) -> None:
        super().__init__(inner)
        self._omits = omits

    def sync_data(self, descriptor: int) -> None:
        if not self._omits(self.open_files[descriptor].name):
            super().sync_data(descriptor)

    def fsync(self, descriptor: int) -> None:
        if not self._omits(self.open_folders[descriptor].name):
            super().fsync(descriptor)


OMITTED: Mapping[str, Callable[[str], bool]] = {
    "of records": lambda name: name.endswith((".log", ".spare")),
    "of the promise": lambda name: name == "control",
    "of a bound that was lowered": lambda name: name == "synced",
    "of the names of segments": lambda name: name == FOLDER.name,
}


@pytest.mark.parametrize("omitted", OMITTED)
def test_every_sync_is_needed(omitted: str) -> None:
    """A log without one of its syncs breaks a guarantee, which is detected."""
    wrap = partial(WithoutSync, omits=OMITTED[omitted])
    assert not all(cut(random_of(f"{omitted} {number}"), wrap) for number in range(4 * CUTS))
