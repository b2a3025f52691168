"""Batches: whichever way they take through the server, they do the same."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from shalekv.engine.commit import COMMIT_OVERHEAD_BYTES, Commit
from shalekv.engine.sorted_runs import entries_bytes
from shalekv.errors import InvalidRequest
from shalekv.roles import transactions
from shalekv.settings import LimitSettings
from shalekv.v1 import kv_pb2
from tests.kit.engine.commits import unsettled
from tests.kit.serving.messages import add, change, delete, delete_range, get, put
from tests.kit.states import NOW_MS, DictState, counter, entry_of

LIMITS = LimitSettings(
    value_bytes_max=9, batch_count_max=6, batch_bytes_max=1_024, ttl_ms_max=1_000
)
KEYS = st.sampled_from([b"", b"a", b"ab", b"b", b"c" * 500])
CHANGES = (
    st.builds(put, KEYS, st.just(counter(5)))
    | st.builds(delete, KEYS)
    | st.builds(add, KEYS, st.integers(-9, 9))
    | st.builds(delete_range, start=KEYS, end=KEYS)
    | st.builds(delete_range, prefix=KEYS)
)


def state() -> DictState:
    """Some counters."""
    found = (entry_of(b"a", counter(1), 3), entry_of(b"b", counter(-2), 4, NOW_MS + 50))
    return DictState({entry.key: entry for entry in found})


def commit_of(order: transactions.Order) -> Commit:
    """What an order does to the state, as a commit of the log."""
    commit = Commit.of(order.transaction, 7, unsettled, size_bytes=order.size_bytes)
    commit.decide(state())
    return commit


@given(then=st.lists(CHANGES, max_size=4), otherwise=st.lists(CHANGES, max_size=2))
def test_order_takes_no_more_than_it_was_admitted_with(
    then: list[kv_pb2.Change], otherwise: list[kv_pb2.Change]
) -> None:
    """Whatever a transaction decides to change, it was admitted with at least so many bytes."""
    for holds in (True, False):
        request = kv_pb2.TxnRequest(
            compares=[kv_pb2.Compare(key=b"a", exists=holds)],
            then=[get(b"a"), *map(change, then)],
            otherwise=map(change, otherwise),
        )
        try:
            order = transactions.txn_order(request, LIMITS)
        except InvalidRequest:
            return
        commit = commit_of(order)
        written = (*commit.entries, *commit.range_tombstones)
        assert order.size_bytes >= COMMIT_OVERHEAD_BYTES + entries_bytes(written)
