"""One log through some power cuts: what it promised, compared with what is left after each."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

from shalekv.core.quorum.acceptor import Commit, Effect, Flush, Reset, Save, Truncate, Write
from shalekv.core.quorum.messages import Health
from shalekv.core.quorum.record import NO_BALLOT, Ballot, Mark, Record
from shalekv.errors import ShaleError
from shalekv.store.filesystem import FileSystem
from shalekv.store.member_log.log import MemberLog
from tests.kit.disks.crashing import CrashingDisk
from tests.kit.disks.member_logs import ALL, new_log, old_log, records_after

FOLDER = Path("/data/member")
ROUNDS = 4
STEPS_MAX = 300
KINDS = ("append", "write", "flush", "truncate", "reset", "trim", "promise", "reopen")
WEIGHTS = (6, 5, 3, 2, 1, 2, 1, 1)
SEGMENT_BYTES = 600


class Cut(BaseException):
    """The process is gone in the middle of a call."""


@dataclass(slots=True)
class Chain:
    """A log as it may be found: from `start`, any end from `least` to the last record."""

    start: Mark = field(default_factory=Mark)
    records: list[Record] = field(default_factory=list)  # those that were trimmed, too
    base: Mark = field(default_factory=Mark)
    least_lsn: int = 0

    @property
    def last(self) -> Mark:
        return self.records[-1].mark if self.records else self.start

    def mark_at(self, lsn: int) -> Mark:
        """REQUIRES: from `start` on."""
        return self.start if lsn == self.start.lsn else self.records[lsn - self.start.lsn - 1].mark

    def up_to(self, lsn: int) -> list[Record]:
        return [record for record in self.records if record.lsn <= lsn]

    def copy(self) -> Chain:
        return Chain(self.start, list(self.records), self.base, self.least_lsn)


@dataclass(slots=True)
class Promises:
    """What may be found: one of these."""

    told: Ballot = NO_BALLOT
    asked: Ballot = NO_BALLOT


class Trial:
    """Runs a log on a disk that is cut at a random call; `wrap` stands between the two."""

    def __init__(self, seed: int, wrap: Callable[[FileSystem], FileSystem]) -> None:
        self.random = Random(seed)
        self.left = STEPS_MAX
        self.disk = CrashingDisk(self.step)
        self.wrap = wrap
        self.chain = Chain()
        self.possible: list[Chain] = []
        self.promises = Promises()
        self.epoch = 1
        self.committed_lsn = 0
        self.problems: list[str] = []

    def step(self, _call: str) -> None:
        self.left -= 1
        if self.left == 0:
            raise Cut

    def run(self) -> list[str]:
        """What is not as it was told, in words."""
        self.left = ALL
        self.disk.mkdir(FOLDER.parent)
        self.disk.fsync(self.disk.open_folder(Path("/")))
        log = new_log(FOLDER, filesystem=self.filesystem(), segment_bytes=SEGMENT_BYTES)
        for _ in range(ROUNDS):
            self.left = self.random.randint(1, STEPS_MAX)
            try:
                while True:
                    log = self.act(log)
            except Cut:
                pass
            try:
                log = self.restart()
            except (ShaleError, OSError) as error:
                self.problems.append(f"it cannot be opened: {error!r}")
            if self.problems:
                break
        return self.problems

    def filesystem(self) -> FileSystem:
        return self.wrap(self.disk)

    def restart(self) -> MemberLog:
        """Cut the power, or only kill the process; then cut it again while it starts."""
        while True:
            if self.random.random() < 0.7:
                self.disk = self.disk.after_cut(self.random, self.step)
            self.left = self.random.choice((ALL, self.random.randint(1, 60)))
            try:
                log = old_log(FOLDER, filesystem=self.filesystem(), segment_bytes=SEGMENT_BYTES)
            except Cut:
                continue
            self.left = ALL
            self.judge(log)
            self.epoch += 1
            return log

    def judge(self, log: MemberLog) -> None:
        """Compare what was found with what may be."""
        found = log.recovered
        if found.health is not Health.SOUND:
            self.problems.append("a power cut alone made it damaged")
        if found.promise not in {self.promises.told, self.promises.asked}:
            self.problems.append(f"promised {found.promise}")
        records = log.read(found.log.base.lsn + 1, ALL, ALL)
        if [r.lsn for r in records] != list(range(found.log.base.lsn + 1, found.log.last.lsn + 1)):
            self.problems.append("what can be read is not what the log says")
        if found.committed_lsn > min(found.log.last.lsn, max(self.committed_lsn, self.base_max())):
            self.problems.append(f"{found.committed_lsn} records are called committed")
        self.promises = Promises(found.promise, found.promise)
        for chain in [*self.possible, self.chain]:
            if self.is_one(chain, found.log.base, found.log.last, records):
                kept = chain.up_to(found.log.last.lsn)
                self.chain = Chain(chain.start, kept, found.log.base, found.log.last.lsn)
                self.possible = []
                return
        chain = self.chain
        wanted = f"from {chain.base} to {chain.least_lsn} at least, {chain.last} at most"
        self.problems.append(f"{found.log} is not {wanted}")

    def base_max(self) -> int:
        return max(chain.base.lsn for chain in [*self.possible, self.chain])

    def is_one(self, chain: Chain, base: Mark, last: Mark, records: list[Record]) -> bool:
        if not chain.start.lsn <= base.lsn <= chain.base.lsn:
            return False
        if not max(chain.least_lsn, base.lsn) <= last.lsn <= chain.last.lsn:
            return False
        is_base = chain.mark_at(base.lsn) == base
        return is_base and records == [r for r in chain.up_to(last.lsn) if r.lsn > base.lsn]

    def act(self, log: MemberLog) -> MemberLog:
        kind = self.random.choices(KINDS, WEIGHTS)[0]
        if kind == "reopen":
            log.close()
            self.chain.least_lsn = min(self.chain.least_lsn, self.chain.last.lsn)
            log = old_log(FOLDER, filesystem=self.filesystem(), segment_bytes=SEGMENT_BYTES)
            self.judge(log)
            return log
        if kind == "trim":
            self.trim(log)
            return log
        effects = list(self.effects(kind))
        log.submitted(effects)
        log.apply(effects)
        if kind in {"append", "flush", "truncate", "reset"}:
            log.flush()
            self.chain.least_lsn = self.chain.last.lsn
        self.possible = []
        self.promises.told = self.promises.asked
        return log

    def effects(self, kind: str) -> Iterator[Effect]:
        """What to do; the chain is as it is afterwards, and `possible` what it was before."""
        random, chain = self.random, self.chain
        before = chain.copy()
        if kind in {"append", "write"}:
            sizes = [random.choice((0, 10, 90, 200, 900)) for _ in range(random.randint(1, 4))]
            payloads = [random.randbytes(size) for size in sizes]
            new = records_after(chain.last, payloads, epoch=self.epoch)
            chain.records += new
            yield Write(new)
            yield Flush()
            self.committed_lsn = max(self.committed_lsn, random.randint(0, before.least_lsn))
            yield Commit(min(self.committed_lsn, before.least_lsn))
        elif kind == "truncate":
            last = chain.mark_at(random.randint(chain.base.lsn, chain.last.lsn))
            before.least_lsn = min(before.least_lsn, last.lsn)
            self.possible = [before]
            chain.records = chain.up_to(last.lsn)
            chain.least_lsn = min(chain.least_lsn, last.lsn)
            self.epoch += 1
            yield Truncate(last)
        elif kind == "reset":
            lsn = max(0, chain.last.lsn + random.randint(-5, 5))
            base = Mark(lsn, max(0, self.epoch - 1), random.getrandbits(32), lsn, True)
            self.possible = [before]
            self.chain = Chain(base, [], base, base.lsn)
            self.epoch += 1
            yield Reset(base)
        elif kind == "promise":
            self.promises.asked = Ballot(self.promises.told.epoch + 1, random.randbytes(16))
            yield Save(self.promises.asked, Health.SOUND)

    def trim(self, log: MemberLog) -> None:
        chain = self.chain
        base = chain.mark_at(self.random.randint(chain.base.lsn, chain.last.lsn))
        chain.base = base  # an older one may be found as well
        log.trim(base)
        chain.least_lsn = max(chain.least_lsn, base.lsn)
