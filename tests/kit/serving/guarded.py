"""A guard with a policy and tokens that a test changes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace

from shalekv.errors import PolicyUnknown, Unauthenticated
from shalekv.protocol.access import ANONYMOUS, Grant, Policy, Principal, Role, Rule, Verb
from shalekv.protocol.entry import KeyRange, prefix_end
from shalekv.server.access.identity import Credentials, Identity

BEARER = "Bearer "


class HeldPolicy:
    """A policy that a test replaces."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.is_known = True
        self.is_stale = False
        self._changed: list[Callable[[], None]] = []

    def check(self) -> None:
        if self.is_stale:
            raise PolicyUnknown("it may have been replaced")

    def listen(self, changed: Callable[[], None]) -> None:
        self._changed.append(changed)

    def set(self, policy: Policy) -> None:
        self.policy = replace(policy, version=self.policy.version + 1)
        for each in self._changed:
            each()


class KnownTokens:
    """The text of a token is the name of its principal, if that is known."""

    def __init__(self, *names: str) -> None:
        self.names = {*names}
        self.asked = 0

    def identify(self, credentials: Credentials) -> Identity:
        self.asked += 1
        if not credentials.authorization:
            return Identity(ANONYMOUS)
        name = credentials.authorization.removeprefix(BEARER)
        if name not in self.names:
            raise Unauthenticated("the token is not known")
        return Identity(Principal(f"token:{name}"), proof=name)

    def is_valid(self, identity: Identity) -> bool:
        return identity.proof in self.names


class HeldTokens(KnownTokens):
    """Finding out who calls takes until `known` is set."""

    def __init__(self, *names: str) -> None:
        super().__init__(*names)
        self.is_asked, self.known = asyncio.Event(), asyncio.Event()

    async def identify(self, credentials: Credentials) -> Identity:  # type: ignore[override]
        self.is_asked.set()
        await self.known.wait()
        return super().identify(credentials)


def prefix(text: bytes, *verbs: Verb) -> Rule:
    """A rule that allows verbs on a prefix."""
    return Rule(frozenset(verbs), KeyRange(text, prefix_end(text)))


def policy_of(**rules: Rule) -> Policy:
    """An enforced policy in which each token has a role of one rule; `root` has everything."""
    roles = tuple(Role(name, (rule,)) for name, rule in rules.items())
    grants = (Grant("token:root", ("root",)), *(Grant(f"token:{n}", (n,)) for n in rules))
    return Policy(version=1, is_enforced=True, roles=roles, grants=grants, secret=b"s" * 32)


def shown(name: str) -> tuple[tuple[str, str], ...]:
    """The metadata of a call with a token; none: of nobody."""
    return (("authorization", BEARER + name),) if name else ()
