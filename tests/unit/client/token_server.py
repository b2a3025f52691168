"""Real servers with a guard, which knows the tokens that a test names; and functions for tokens."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import replace

from shalekv.protocol.access import Principal, Verb
from shalekv.server.access.guard import Guard
from shalekv.server.access.identity import Credentials, Identity
from shalekv_client import Client, Unauthenticated
from tests.kit.processes.in_process import memory_store
from tests.kit.processes.in_process import serving as serving_writer
from tests.kit.serving.guarded import BEARER, HeldPolicy, KnownTokens, policy_of, prefix

OLD, NEW, WRONG = "an-old-secret", "a-new-secret", "an-unknown-secret"
ALICE = Principal("token:alice")
ALL = (Verb.READ, Verb.WRITE, Verb.DELETE_RANGE, Verb.WATCH, Verb.ADMIN)
POLICY = policy_of(alice=prefix(b"", *ALL), few=prefix(b"a", *ALL))


class AliceTokens(KnownTokens):
    """All tokens are of one principal, but one of another."""

    def identify(self, credentials: Credentials) -> Identity:
        found = super().identify(credentials)
        name = credentials.authorization.removeprefix(BEARER)
        return replace(found, principal=ALICE) if name in {OLD, NEW} else found


class Guarded:
    """A running writer, and the tokens that it knows."""

    def __init__(self, address: str, guard: Guard, tokens: KnownTokens, policy: HeldPolicy) -> None:
        self.address = address
        self.guard = guard
        self._tokens = tokens
        self._policy = policy

    @property
    def refused(self) -> int:
        """Calls and operations whose callers were not known."""
        return self.guard.refused.unauthenticated

    def withdraw(self, token: str) -> None:
        """Know a token no more; streams of its caller end at once."""
        self._tokens.names.discard(token)
        self._policy.set(POLICY)

    async def end(self, token: str) -> None:
        """Withdraw a token, and wait until calls and streams with it are refused."""
        async with Client(self.address, access_token=token) as client, client.session() as session:
            await session.get(b"k")
            self.withdraw(token)
            with suppress(Unauthenticated):
                while True:
                    await session.get(b"k")


@asynccontextmanager
async def guarded() -> AsyncIterator[Guarded]:
    tokens, policy = AliceTokens(OLD, NEW, "few"), HeldPolicy(POLICY)
    guard = Guard(tokens, policy)
    async with serving_writer(memory_store(), guard) as served, asyncio.TaskGroup() as tasks:
        running = tasks.create_task(guard.run())
        try:
            yield Guarded(served.listen, guard, tokens, policy)
        finally:
            running.cancel()


class Asked:
    """A function that returns tokens in turn, and the last of them from then on."""

    def __init__(self, *tokens: str) -> None:
        self.tokens = tokens
        self.count = 0

    def __call__(self) -> str:
        self.count += 1
        return self.tokens[min(self.count, len(self.tokens)) - 1]
