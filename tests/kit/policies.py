"""An access policy with every feature, for the tests of its format and of what copies it."""

from __future__ import annotations

from shalekv.protocol.access import (
    ANYBODY,
    AUTHENTICATED,
    ROOT,
    Grant,
    Policy,
    Quota,
    Role,
    Rule,
    Verb,
)
from shalekv.protocol.entry import KeyRange, prefix_end

POLICY = Policy(
    version=7,
    is_enforced=True,
    roles=(
        Role(
            "orders:write",
            (
                Rule(frozenset({Verb.READ, Verb.WRITE}), KeyRange(b"orders/", b"orders0")),
                Rule(frozenset({Verb.DELETE_RANGE}), KeyRange(b"orders/old/", b"orders/old0")),
                Rule(frozenset({Verb.WATCH}), KeyRange(b"\xff", prefix_end(b"\xff"))),
            ),
        ),
        Role("ops", (Rule(frozenset({Verb.ADMIN, Verb.INGEST})),)),
        Role("nothing", ()),
    ),
    grants=(
        Grant("token:ann", ("orders:write", "ops"), Quota(1, 2, 3, 4, 5, 6, 7)),
        Grant("uri:spiffe://example.org/a:b", (ROOT,)),
        Grant("claim:groups=a=b", ("ops",)),
        Grant(AUTHENTICATED, ("nothing",), Quota(calls_per_s=100)),
        Grant(ANYBODY),
    ),
    secret=bytes(range(32)),
)
