"""What clients ask for: operations on few keys, so that they meet, and conditions on them."""

from __future__ import annotations

from hypothesis import strategies as st

from shalekv.core.key_range import KeyRange
from shalekv.core.transaction import (
    Add,
    Delete,
    DeleteRange,
    EmptyCompare,
    ExistsCompare,
    Get,
    Operator,
    Put,
    SeqCompare,
    ValueCompare,
)

ALL_KEYS = [b"a", b"ab", b"abc", b"b", b"b\xff", b"b\xff\xff", b"c", b"\xff", b"\xff\xff"]
KEYS = st.sampled_from(ALL_KEYS)
BOUNDS = st.just(b"") | KEYS
RANGES = st.tuples(BOUNDS, BOUNDS).map(
    lambda pair: KeyRange(*pair) if not pair[1] else KeyRange(*sorted(pair))
)
VALUES = st.sampled_from([b"", b"1", b"2", b"x" * 700, bytes(8), b"\xff" * 7 + b"\x7f"])
LIVES_MS = st.sampled_from([0, 0, 0, 1, 10, 1_000])
IDEMPOTENCY_KEYS = st.sampled_from([b"", b"", b"k1", b"k2"])
PUTS = st.builds(Put, KEYS, VALUES, LIVES_MS)
PLAIN = PUTS | st.builds(Delete, KEYS)
SOME_RANGES = RANGES.filter(any)  # all keys are deleted by a call of its own
CHANGES = st.one_of(
    PLAIN,
    st.builds(DeleteRange, SOME_RANGES),
    st.builds(Add, KEYS, st.sampled_from([1, -1, 5, 2**62])),
)
OPERATIONS = st.lists(CHANGES | st.builds(Get, KEYS), max_size=4)
SEQS = st.integers(0, 8)  # which of the numbers that are there
CONDITIONS = st.one_of(
    st.none(),
    st.builds(ExistsCompare, KEYS, st.booleans()),
    st.builds(SeqCompare, KEYS, SEQS, st.just(Operator.EQUAL)),
)
COMPARES = st.one_of(
    st.builds(SeqCompare, KEYS, SEQS, st.sampled_from(Operator)),
    st.builds(ValueCompare, KEYS, VALUES, st.sampled_from(Operator)),
    st.builds(ExistsCompare, KEYS, st.booleans()),
    st.builds(EmptyCompare, RANGES),
)
