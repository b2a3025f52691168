"""Transactions under faults, rivals and ends at any moment, against a serial model.

The model does what was applied or answered, one commit after the other, in the order of the final
sequence numbers: every decision, and so every reply, must be what that order gives; and the order
must be one that the clients can have seen.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import count
from random import Random

import pytest

from shalekv.core.entry import Entry
from shalekv.core.range_tombstones import NONE
from shalekv.core.transaction import Change, Decision
from shalekv.engine.commit import RECORD_BYTES, Claim, Commit, Receipt, WalContents, changes_bytes
from shalekv.errors import (
    ConditionFailed,
    CounterOverflow,
    NotACounter,
    OutcomeUnknown,
    ShaleError,
)
from shalekv.format.idempotency import ReplyKind, client_key, decode_record
from tests.kit.engine.commits import NOW_MS, read
from tests.kit.engine.running_log import Told
from tests.kit.states import DictState
from tests.sim.faults import Faults
from tests.sim.run import simulate
from tests.sim.world import World
from tests.unit.engine.draw import KEYS, Draw
from tests.unit.engine.trials import ENDS, Trial

SIZE_BYTES = 3_000  # of a transaction
FIRST_SEQ = 50  # of the view before the log has written anything
REFUSALS = (ConditionFailed, NotACounter, CounterOverflow)
STEP = count()  # when something happened


@dataclass
class Attempt(Told):
    """One commit of a client, and between which steps it was under way."""

    commit: Commit = field(init=False)
    began: int = field(default_factory=lambda: next(STEP))
    ended: int = field(init=False)

    def __post_init__(self) -> None:
        super().__init__()

    def settle(self, outcome: Receipt | ShaleError) -> None:
        self.ended = next(STEP)
        super().settle(outcome)

    @property
    def seq(self) -> int:
        """Its place among all commits, once it is settled."""
        return self.commit.seq

    @property
    def outcome_told(self) -> Receipt | ShaleError:
        """What it was told, once."""
        (told,) = self.told
        return told


class TransactionTrial(Trial):
    """Clients that transact and write on few keys."""

    def __init__(self, world: World, *, end: str) -> None:
        super().__init__(world, end=end, clients=8)
        self.attempts: list[Attempt] = []

    async def client(self, number: int) -> None:
        random = Random(f"{self.world.seed}/client {number}")
        draw = Draw(random)
        for _ in range(30):
            try:
                attempt = await self.attempt(draw)
            except ShaleError:
                return
            if random.random() < 0.5:
                told = await attempt.outcome()
                draw.seen_seq = told.seq if isinstance(told, Receipt) else draw.seen_seq
            await self.world.sleep_ms(random.choice([0, 0, 1, 30]))

    async def attempt(self, draw: Draw) -> Attempt:
        """One commit more, when there is room for it; some have an idempotency key."""
        changes = draw.changes() if draw.random.random() < 0.3 else []
        size_bytes = changes_bytes(changes) if changes else SIZE_BYTES
        has_claim = draw.random.random() < 0.3
        admitted_bytes = size_bytes + (RECORD_BYTES if has_claim else 0)
        if not self.admission.try_admit(admitted_bytes):
            await self.admission.wait(admitted_bytes)
        attempt = Attempt()
        claim = None
        if has_claim:
            claim = Claim(b"key %d" % attempt.began, b"h" * 16, 2**40, ReplyKind.TXN, reply_of)
        if changes:
            attempt.commit = self.log.submit(changes, attempt.settle, claim=claim)
        else:
            attempt.commit = self.log.transact(
                draw.transaction(), attempt.settle, size_bytes=size_bytes, claim=claim
            )
        self.attempts.append(attempt)
        return attempt

    def check(self) -> None:
        """All of it."""
        objects = self.objects()
        slots = {
            entry.seq: slot
            for slot, contents in objects.items()
            for entry in (*contents.points, *contents.range_tombstones)
        }
        placed = sorted(self.placed(slots), key=lambda attempt: attempt.seq)
        assert {a.seq for a in placed if a.commit.writes} == slots.keys()
        model = self.check_serially(placed)
        check_order(placed)
        self.check_records(placed, slots)
        assert replayed(objects).values() == model.values()
        if self.end == "close" and self.log.is_closing:
            assert len(placed) == len(self.attempts)
            view = self.memtable.view(self.prefix.seq, self.prefix.wal_id)
            expected = {key: value for key, (value, _) in model.values().items()}
            assert dict(read(view)) == expected
            got = {key: self.memtable.get(key) for key in KEYS}
            assert {k: e.value for k, e in got.items() if e and e.is_visible(NOW_MS)} == expected
        self.check_nothing_is_left()

    def placed(self, slots: dict[int, int]) -> list[Attempt]:
        """Attempts that have a place in the history: applied, or answered from its state."""
        found = []
        for attempt in self.attempts:
            told, is_durable = attempt.outcome_told, attempt.seq in slots
            if isinstance(told, Receipt):
                assert is_durable is attempt.commit.writes
                found.append(attempt)
            elif isinstance(told, REFUSALS):
                assert not is_durable
                found.append(attempt)
            elif isinstance(told, OutcomeUnknown):
                found += [attempt] if is_durable else []
            else:
                assert not is_durable, f"was not lost: {told}"
        return found

    def check_serially(self, placed: list[Attempt]) -> DictState:
        """Do it all again, one after the other; what must come out of it."""
        model = DictState(now_ms=NOW_MS)
        view_seq = FIRST_SEQ
        for attempt in placed:
            commit, told = attempt.commit, attempt.outcome_told
            decision = Decision([change_of(entry) for entry in commit.entries])
            if commit.transaction is not None:
                decision = commit.transaction.decide(model)
                assert commit.decision is not None
                assert repr(commit.decision) == repr(decision)
            model.apply(decision, attempt.seq)
            view_seq = attempt.seq if commit.writes else view_seq
            if isinstance(told, Receipt):
                assert (told.seq, told.decision) == (view_seq, commit.decision)
            elif isinstance(told, REFUSALS):
                assert repr(told) == repr(decision.refusal)
        return model

    def check_records(self, placed: list[Attempt], slots: dict[int, int]) -> None:
        """Each applied commit with a key has one record, in its object, and nobody else has."""
        found = {
            (client_key(entry.key), entry.seq, slot, decode_record("", entry.value))
            for slot, contents in self.objects().items()
            for entry in contents.records
        }
        commits = [attempt.commit for attempt in placed if attempt.commit.writes]
        assert {(key, seq, slot, record.reply) for key, seq, slot, record in found} == {
            (commit.claim.key, commit.seq, slots[commit.seq], reply_of(commit.decision))
            for commit in commits
            if commit.claim is not None
        }
        assert all(record.wal_id == slot for _, _, slot, record in found)


def reply_of(decision: Decision | None) -> bytes:
    """What a repeat would be answered."""
    return b"" if decision is None else repr((decision.succeeded, decision.results)).encode()


def change_of(entry: Entry) -> Change:
    """What the commit of this entry does to its key."""
    return Change(entry.key, entry.kind, entry.value, entry.expire_at_ms)


def check_order(placed: list[Attempt]) -> None:
    """What had ended before something else began has the lower number (I14)."""
    for after in placed:
        for before in placed:
            if before.ended < after.began:
                assert before.seq < after.seq


def replayed(objects: Mapping[int, WalContents]) -> DictState:
    """What a reader makes of the objects."""
    state = DictState(now_ms=NOW_MS)
    tombstones = NONE.with_added(e for each in objects.values() for e in each.range_tombstones)
    for contents in objects.values():  # in slot order, which is sequence order (I4)
        for entry in reversed(contents.points):  # oldest first
            state.entries[entry.key] = entry
    state.entries = {k: e for k, e in state.entries.items() if not tombstones.hides(e)}
    return state


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("seed", range(15))
def test_every_reply_is_what_the_order_of_commits_gives(seed: int, end: str) -> None:
    """Told, refused, read, counted and remembered is what a serial run gives, whatever happens."""

    async def main(world: World) -> None:
        trial = TransactionTrial(world, end=end)
        await trial.run()
        trial.check()

    simulate(seed, main, faults=Faults.swarm(Random(seed)))
