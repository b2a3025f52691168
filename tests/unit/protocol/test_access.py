"""The decision about an operation against a plain model, a set of allowed keys; and policies."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shalekv.errors import InvalidRequest
from shalekv.protocol.access import (
    ALL_KEYS,
    ANONYMOUS,
    ANYBODY,
    AUTHENTICATED,
    GRANTS_MAX,
    LIMIT_MAX,
    ROLES_MAX,
    ROLES_OF_GRANT_MAX,
    ROOT,
    RULES_MAX,
    SUBJECT_CHARS_MAX,
    Grant,
    Need,
    Permissions,
    Policy,
    Principal,
    Quota,
    Role,
    Rule,
    Verb,
    check_policy,
    permissions_of,
    quota_of,
)
from shalekv.protocol.entry import KEY_BYTES_MAX, KeyRange
from shalekv.server.requests import PageSeal

# All keys of up to two of these letters, in order, and bounds between and outside them.
LETTERS = "abc"
KEYS = sorted({first + second for first in ("", *LETTERS) for second in ("", *LETTERS)})
BOUNDS = st.text("`abcd", max_size=3).map(str.encode)
RANGES = st.builds(KeyRange, BOUNDS, BOUNDS)
VERBS = st.frozensets(st.sampled_from(Verb), min_size=1)
RULES = st.lists(st.builds(Rule, VERBS, RANGES), max_size=4).map(tuple)
NAMES = ("reader", "writer", "auditor")
ROLES = st.tuples(*(st.builds(Role, st.just(name), RULES) for name in NAMES))
SUBJECTS = ("token:ann", "uri:spiffe://x/bob", "claim:groups=ops", AUTHENTICATED, ANYBODY)
GRANTS = st.lists(
    st.builds(
        Grant,
        st.sampled_from(SUBJECTS),
        st.lists(st.sampled_from((*NAMES, ROOT, "none")), max_size=2).map(tuple),
    ),
    max_size=4,
).map(tuple)
POLICIES = st.builds(Policy, st.just(1), st.booleans(), ROLES, GRANTS)
PRINCIPALS = st.sampled_from(
    (
        ANONYMOUS,
        Principal("token:ann"),
        Principal("token:eve", frozenset({"claim:groups=ops", "uri:spiffe://x/bob"})),
    )
)
ANN = Principal("token:ann")
READ_WRITE = frozenset({Verb.READ, Verb.WRITE})


def of_key(verb: Verb, key: bytes) -> Need:
    """The need of a verb on one key."""
    return Need(verb, KeyRange(key, key + b"\0"))


def contains(keys: KeyRange, key: bytes) -> bool:
    return keys.start <= key and (not keys.end or key < keys.end)


def is_granted(subject: str, principal: Principal) -> bool:
    """Return whether a grant to the subject counts for the principal."""
    if subject == ANYBODY:
        return True
    if subject == AUTHENTICATED:
        return principal != ANONYMOUS
    return subject == principal.name or subject in principal.others


def allows(policy: Policy, principal: Principal, verb: Verb, key: bytes) -> bool:
    """Return whether the policy allows the verb on one key: the plain model."""
    if not policy.is_enforced:
        return True
    granted = {n for g in policy.grants if is_granted(g.subject, principal) for n in g.roles}
    rules = [rule for role in policy.roles if role.name in granted for rule in role.rules]
    return ROOT in granted or any(verb in r.verbs and contains(r.keys, key) for r in rules)


def enforced(roles: Iterable[Role], *grants: Grant) -> Policy:
    return Policy(1, is_enforced=True, roles=tuple(roles), grants=grants)


def allowed_to_ann(*rules: Rule) -> Permissions:
    policy = enforced([Role("r", rules)], Grant(ANN.name, ("r",)))
    return permissions_of(policy, ANN)


@given(POLICIES, PRINCIPALS)
def test_a_key_is_allowed_as_the_model_says(policy: Policy, principal: Principal) -> None:
    """One key: the decision is that of the model, and so is that of the rules made of it."""
    permissions = permissions_of(policy, principal)
    again = permissions_of(enforced([Role("r", permissions.rules())], Grant(ANYBODY, ("r",))), ANN)
    for verb in Verb:
        for key in map(str.encode, KEYS):
            expected = allows(policy, principal, verb, key)
            assert permissions.allow(of_key(verb, key)) is expected
            assert again.allow(of_key(verb, key)) is expected


@given(POLICIES, PRINCIPALS, RANGES, st.sampled_from(Verb))
def test_a_range_is_allowed_if_each_of_its_keys_is(
    policy: Policy, principal: Principal, keys: KeyRange, verb: Verb
) -> None:
    """Allowed exactly if the model allows each key that is a bound of a rule or in between."""
    permissions = permissions_of(policy, principal)
    assert permissions.is_empty is not any(
        permissions.allow(of_key(verb, key)) for verb in Verb for key in points(policy, keys)
    )
    inside = [key for key in points(policy, keys) if contains(keys, key)]
    # A range without a key counts as its first key.
    expected = all(allows(policy, principal, verb, key) for key in inside or [keys.start])
    assert permissions.allow(Need(verb, keys)) is expected


def points(policy: Policy, keys: KeyRange) -> list[bytes]:
    """One key of each interval in which all keys are in the same ranges: its first."""
    ranges = [keys, *(rule.keys for role in policy.roles for rule in role.rules)]
    return sorted({b"", *(bound for each in ranges for bound in each)})


def test_adjacent_and_nested_ranges_join() -> None:
    """A need that spans several rules is covered by them together."""
    read = frozenset({Verb.READ})
    permissions = allowed_to_ann(
        Rule(read, KeyRange(b"m", b"p")),
        Rule(read, KeyRange(b"a", b"m")),
        Rule(read, KeyRange(b"b", b"c")),
        Rule(read, KeyRange(b"x", b"")),
    )
    assert permissions.allow(Need(Verb.READ, KeyRange(b"a", b"p")))
    assert not permissions.allow(Need(Verb.READ, KeyRange(b"a", b"p\0")))
    assert not permissions.allow(Need(Verb.READ, KeyRange(b"o", b"y")))
    assert not permissions.allow(Need(Verb.READ, KeyRange(b"a", b"")))
    assert permissions.allow(Need(Verb.READ, KeyRange(b"xx", b"")))
    assert not permissions.allow(Need(Verb.WRITE, KeyRange(b"a", b"b")))
    assert [rule.keys for rule in permissions.rules()] == [KeyRange(b"a", b"p"), (b"x", b"")]


def test_a_rule_without_keys_takes_none_away() -> None:
    """Its bounds, of which the end comes first, are not among those that are searched."""
    read = frozenset({Verb.READ})
    bounds = (KeyRange(b"a", b"e"), KeyRange(b"f", b"b"), KeyRange(b"x", b"y"))
    permissions = allowed_to_ann(*(Rule(read, keys) for keys in bounds))
    assert permissions.allow(of_key(Verb.READ, b"c"))
    assert not permissions.allow(of_key(Verb.READ, b"f"))


def test_rules_join_the_verbs_of_a_range() -> None:
    """The rules that a caller is shown are one for each range."""
    assert allowed_to_ann(
        Rule(frozenset({Verb.READ}), KeyRange(b"a", b"b")),
        Rule(frozenset({Verb.WRITE}), KeyRange(b"a", b"b")),
    ).rules() == (Rule(READ_WRITE, KeyRange(b"a", b"b")),)
    assert permissions_of(Policy(), ANONYMOUS).rules() == (Rule(frozenset(Verb), ALL_KEYS),)
    assert allowed_to_ann().rules() == ()


def test_a_policy_that_is_not_enforced_allows_and_limits_nothing() -> None:
    """Version 0 and a policy that is only prepared."""
    limited = Grant(ANYBODY, quota=Quota(calls_per_s=1))
    for policy in (Policy(), replace(enforced([], limited), is_enforced=False)):
        assert permissions_of(policy, ANONYMOUS).allow(Need(Verb.ADMIN))
        assert quota_of(policy, ANONYMOUS) == Quota()


def test_an_enforced_policy_without_grants_allows_nothing() -> None:
    """Nobody gets in by default."""
    for principal in (ANONYMOUS, ANN):
        permissions = permissions_of(enforced([]), principal)
        assert permissions.is_empty
        assert not permissions.allow(Need(Verb.READ, KeyRange(b"a", b"b")))


def test_subjects_of_a_claim_do_not_make_an_anonymous_caller_known() -> None:
    """Without a name, only what is granted to everybody counts."""
    policy = enforced([], Grant("", (ROOT,)), Grant(AUTHENTICATED, (ROOT,)))
    assert permissions_of(policy, ANONYMOUS).is_empty
    assert permissions_of(policy, Principal("", frozenset({AUTHENTICATED}))).is_empty


def test_the_smallest_limit_of_each_kind_counts() -> None:
    """0 is no limit; kinds are independent."""
    policy = enforced(
        [],
        Grant(ANN.name, quota=Quota(calls_per_s=10, watches=3)),
        Grant(AUTHENTICATED, quota=Quota(calls_per_s=5, sessions=2)),
        Grant("token:bob", quota=Quota(scans=1)),
        Grant(ANYBODY, quota=Quota(watches=7)),
    )
    assert quota_of(policy, ANN) == Quota(calls_per_s=5, watches=3, sessions=2)
    assert quota_of(policy, ANONYMOUS) == Quota(watches=7)


GOOD = Policy(
    is_enforced=True,
    roles=(
        Role("orders:read", (Rule(READ_WRITE, KeyRange(b"orders/", b"orders0")),)),
        Role("ops", (Rule(frozenset({Verb.ADMIN})),)),
        Role("nothing", ()),
    ),
    grants=(
        Grant("token:ann", ("orders:read", "ops")),
        Grant("uri:spiffe://example.org/a:b", (ROOT,)),
        Grant("dns:a.example.org"),
        Grant("cn:Ann Example", ("nothing",)),
        Grant("oidc:1234"),
        Grant("claim:https://example.org/groups=a=b", ("ops",), Quota(calls_per_s=LIMIT_MAX)),
        Grant(AUTHENTICATED, ("nothing",)),
        Grant(ANYBODY, ("nothing",)),
    ),
)


def test_a_good_policy_passes() -> None:
    """All forms of subjects, and the extremes of limits."""
    check_policy(GOOD)
    check_policy(Policy())
    rules = tuple(Rule(READ_WRITE, KeyRange(b"k" * KEY_BYTES_MAX, b"")) for _ in range(10))
    most_roles = tuple(Role(f"r{n}", rules) for n in range(ROLES_MAX))
    names = tuple(role.name for role in most_roles[:ROLES_OF_GRANT_MAX])
    most_grants = tuple(Grant(f"token:{n}", names) for n in range(GRANTS_MAX))
    check_policy(Policy(roles=most_roles, grants=most_grants))


def role(name: str = "a", *rules: Rule) -> Policy:
    return Policy(roles=(Role(name, rules),))


def rule(keys: KeyRange, *verbs: Verb) -> Policy:
    return role("a", Rule(frozenset(verbs), keys))


def grant(subject: str, *roles: str, quota: Quota = Quota()) -> Policy:  # noqa: B008 frozen
    return Policy(grants=(Grant(subject, roles, quota),))


@pytest.mark.parametrize(
    ("policy", "field", "problem"),
    [
        (role(""), "policy.roles[0].name", "not the name of a role"),
        (role("-a"), "policy.roles[0].name", "not the name of a role"),
        (role("a b"), "policy.roles[0].name", "not the name of a role"),
        (role("a" * 129), "policy.roles[0].name", "at most 128"),
        (role(ROOT), "policy.roles[0].name", "every policy has the role 'root'"),
        (rule(ALL_KEYS), "policy.roles[0].rules[0].verbs", "at least one verb"),
        (rule(KeyRange(b"a", b""), Verb.ADMIN), "policy.roles[0].rules[0].range", "verb admin has"),
        (rule(KeyRange(b"a", b"a"), Verb.READ), "policy.roles[0].rules[0].range", "no keys"),
        (
            rule(KeyRange(b"a" * (KEY_BYTES_MAX + 1), b""), Verb.READ),
            "policy.roles[0].rules[0].range",
            "at most 65536 bytes",
        ),
        (Policy(roles=(Role("a", ()), Role("a", ()))), "policy.roles", "'a' is there twice"),
        (grant("token:a", "a"), "policy.grants[0].roles", "there is no role 'a'"),
        (grant("token:a", ROOT, ROOT), "policy.grants[0].roles", "'root' is there twice"),
        (grant("ann"), "policy.grants[0].subject", "not a subject: token:NAME"),
        (grant("token:"), "policy.grants[0].subject", "not a subject"),
        (grant("user:a"), "policy.grants[0].subject", "not a subject"),
        (grant(""), "policy.grants[0].subject", "not a subject"),
        (grant("claim:groups"), "policy.grants[0].subject", "not a subject"),
        (grant("claim:=a"), "policy.grants[0].subject", "not a subject"),
        (grant("token:a\n"), "policy.grants[0].subject", "control character"),
        (grant("cn:a "), "policy.grants[0].subject", "blank"),
        (grant("cn:" + "a" * SUBJECT_CHARS_MAX), "policy.grants[0].subject", "more than 1024"),
        (
            Policy(grants=(Grant(ANYBODY), Grant(ANYBODY))),
            "policy.grants",
            "subject 'anonymous' is there twice",
        ),
        (
            grant("token:a", quota=Quota(scans=LIMIT_MAX + 1)),
            "policy.grants[0].quota.scans",
            "is not in 0..",
        ),
        (Policy(roles=GOOD.roles[:1] * (ROLES_MAX + 1)), "policy.roles", "1000 at most"),
        (Policy(grants=GOOD.grants[:1] * (GRANTS_MAX + 1)), "policy.grants", "10000 at most"),
        (role("a", *GOOD.roles[0].rules * (RULES_MAX + 1)), "policy.roles", "10001 rules"),
        (
            grant("token:a", *(ROOT for _ in range(ROLES_OF_GRANT_MAX + 1))),
            "policy.grants[0].roles",
            "100 at most",
        ),
    ],
)
def test_a_bad_policy_is_refused(policy: Policy, field: str, problem: str) -> None:
    """The error names the field and what is wrong with it."""
    with pytest.raises(InvalidRequest, match=problem) as refused:
        check_policy(policy)
    assert refused.value.field == field


def test_the_secret_is_not_shown() -> None:
    """Neither by a policy nor by what it seals, so that no log or error can have it."""
    secret = b"for nobody"
    seal = PageSeal(bytes(16), ANN.name, secret, ALL_KEYS)
    for each in (Policy(secret=secret), seal):
        assert "for nobody" not in repr(each)
