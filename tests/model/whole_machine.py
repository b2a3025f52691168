"""A whole database, what goes on in it beside its clients, and the dictionary that it is like.

`test_whole_model` has the rules of what clients do.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
)

from shalekv.core.transaction import (
    Compare,
    EmptyCompare,
    Operation,
    SeqCompare,
    Transaction,
)
from shalekv.errors import KeyReused, ShaleError
from shalekv.v1 import kv_pb2
from tests.model.messages import write_of
from tests.model.oracle import (
    Effect,
    State,
    Version,
    decide,
    do,
    state_after,
    visible,
)
from tests.model.strategies import (
    CHANGES,
)
from tests.model.whole_database import WholeDatabase
from tests.model.writers import check_results, check_scan

DURABLE = kv_pb2.DURABILITY_DURABLE
SEEDS = st.integers(0, 255)  # of settings


class Sent(NamedTuple):
    """A request with an idempotency key, and the first answer to it."""

    method: str
    request: Any
    reply: Any


class WholeMachine(RuleBasedStateMachine):
    """`commits` is what must be found in the database."""

    def __init__(self) -> None:
        super().__init__()
        self.database = WholeDatabase()
        self.commits: dict[int, Sequence[Effect]] = {}  # by sequence number
        self.last_seq = 0
        self.state: State = {}
        self.sent: dict[bytes, Sent] = {}
        self.snapped: dict[bytes, State] = {}
        self.loads_count = self.snaps_count = 0

    @initialize(seed=SEEDS)
    def create(self, seed: int) -> None:
        self.database.create()
        self.database.open(seed)

    # --- what goes on beside -------------------------------------------------------------------

    @rule(duration_ms=st.sampled_from([1, 30, 1_000, 20_000]))
    def pass_time(self, duration_ms: int) -> None:
        """Values expire, ages are reached, and whoever waits wakes up."""
        self.database.pass_ms(duration_ms)

    @rule(seed=SEEDS)
    def compact(self, seed: int) -> None:
        """The log and the levels are merged as far as these settings want."""
        self.database.compact(seed)

    @rule(seed=SEEDS)
    def collect(self, seed: int) -> None:
        """What nobody needs is deleted."""
        self.database.collect(seed)

    @rule(seed=SEEDS)
    def reopen(self, seed: int) -> None:
        """A graceful end, and another opening."""
        self.database.end_writer()
        self.database.open(seed)

    @rule(
        seed=SEEDS,
        changes=st.lists(CHANGES, min_size=1, max_size=3),
        after_ms=st.sampled_from([0, 1, 20]),
    )
    def crash(self, seed: int, changes: list[Operation], after_ms: int) -> None:
        """The writer's memory is lost, in the middle of a write of which nobody hears."""
        outcome = decide(Transaction(changes), self.state, self.database.now_ms)
        asked = self.database.begin("write", write_of(changes, DURABLE))
        self.database.pass_ms(after_ms)
        if asked.done() and outcome.refused is not None:
            assert type(asked.exception()) is outcome.refused
        elif asked.done() and outcome.effects:
            self.landed(outcome.effects, asked.result().header.seq)
        self.database.crash_writer()
        self.database.open(seed)
        if not asked.done() and outcome.effects:
            self.see_whether_applied(outcome.effects)

    @invariant()
    def all_is_there(self) -> None:
        """The writer shows everything, and nothing has ended by itself."""
        if hasattr(self.database, "writer"):
            self.database.check_alive()
            request = kv_pb2.ScanRequest()
            check_scan(self.database.scan(request), request, self.visible())

    def teardown(self) -> None:
        self.database.close()

    # --- what becomes of it --------------------------------------------------------------------

    def visible(self) -> State:
        """What a read shows."""
        return visible(self.state, self.database.now_ms)

    def state_at(self, seq: int) -> State:
        """What was there after the commits up to this one."""
        return state_after({each: self.commits[each] for each in self.commits if each <= seq})

    def about(self, key: bytes, condition: Compare | None) -> list[Compare]:
        """The condition, if there is one, of this key."""
        if condition is None:
            return []
        compare = self.with_seq(condition)
        assert not isinstance(compare, EmptyCompare)
        return [compare._replace(key=key)]

    def with_seq(self, compare: Compare) -> Compare:
        """A comparison with a number that is there, if it is of a number."""
        if not isinstance(compare, SeqCompare):
            return compare
        seqs = sorted({1, self.last_seq, *(found.seq for found in self.state.values())} - {0})
        return compare._replace(seq=seqs[compare.seq % len(seqs)])

    def send(self, method: str, request: Any, transaction: Transaction, key: bytes = b"") -> None:
        """A request, which is new unless its key is in use."""
        if key:
            request.header.idempotency_key = key
            if key in self.sent:
                self.resend(method, request, self.sent[key])
                return
        outcome = decide(transaction, self.state, self.database.now_ms)
        try:
            reply = self.database.ask(method, request)
        except ShaleError as error:
            assert type(error) is outcome.refused  # noqa: PT017 - raised or not, the oracle knows
            return
        assert outcome.refused is None
        taken = transaction.then if outcome.succeeded else (transaction.otherwise or ())
        check_results(reply, outcome, taken)
        if outcome.effects:
            self.landed(outcome.effects, reply.header.seq)
            if key:
                self.sent[key] = Sent(method, request, reply)

    def resend(self, method: str, request: Any, sent: Sent) -> None:
        """The same key again; with something else it is refused."""
        if (method, request) != (sent.method, sent.request):
            with pytest.raises(KeyReused):
                self.database.ask(method, request)
            return
        reply = self.database.ask(method, request)
        assert reply.header.seq == sent.reply.header.seq
        reply.header.CopyFrom(sent.reply.header)  # which names the process that answers, too
        assert reply == sent.reply

    def landed(self, effects: Sequence[Effect], seq: int) -> None:
        """A commit is durable."""
        assert seq > self.last_seq
        self.commits[seq] = effects
        self.last_seq = seq
        do(self.state, effects, seq)

    def see_whether_applied(self, effects: Sequence[Effect]) -> None:
        """A write that was cut off is there as a whole, or not at all."""
        replies = self.database.scan(kv_pb2.ScanRequest())
        shown = {e.key: e for reply in replies for e in reply.entries}
        newer = {each.seq for each in shown.values() if each.seq > self.last_seq}
        assert len(newer) <= 1
        seq = min(newer, default=replies[0].header.seq)
        applied = dict(self.state)
        do(applied, effects, seq)
        values = {key: Version(e.seq, e.value, e.expire_at_ms) for key, e in shown.items()}
        if values == visible(applied, self.database.now_ms) and seq > self.last_seq:
            self.landed(effects, seq)
