"""Real servers with access control in the process of the test, made as `shalekv` makes them.

async with guarded_writer(memory_store(), tokens) as served:
    await served.set_policy(policy)
    ... calls with `tokens.shown("alice")` as metadata ...
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random

from shalekv.cli.process.access import ProcessAccess, open_access
from shalekv.clock import Clock, MachineClock
from shalekv.errors import DatabaseExists
from shalekv.protocol.access import Policy
from shalekv.rpc.server import Server
from shalekv.runtime import Runtime, ThreadWorkers
from shalekv.server.access.tokens import StaticToken, new_token
from shalekv.server.database import create_database
from shalekv.server.reader import Reader
from shalekv.server.writer import Writer
from shalekv.settings import ReaderConfig, WriterConfig
from shalekv.store.api import ObjectStore
from shalekv.store.cas import CasStore
from shalekv.store.manifests import StoredManifest
from shalekv.store.policies import StoredPolicy
from tests.kit.processes.in_process import Group, serve_settings

POLICY_CHECK_MS = 100
NEVER_MS = float("inf")
Metadata = tuple[tuple[str, str], ...]


class TokenBook:
    """A file of static tokens, and their texts."""

    def __init__(self, folder: Path, *names: str) -> None:
        self.path = folder / "tokens"
        self._texts: dict[str, str] = {}
        self._tokens: dict[str, StaticToken] = {}
        for name in names:
            self.add(name)
        self._write()

    def add(self, name: str, *, lifetime_ms: float = NEVER_MS) -> None:
        """Add a token of the principal `token:NAME`."""
        now_ms = time.time_ns() // 1_000_000
        text, token = new_token(name, now_ms=now_ms, lifetime_ms=lifetime_ms)
        self._texts[name], self._tokens[name] = text, token
        self._write()

    def give(self, name: str, text: str) -> None:
        """Show this text, which is not in the file, under a name."""
        self._texts[name] = text

    def remove(self, name: str) -> None:
        """Remove a token from the file; it can still be shown."""
        del self._tokens[name]
        self._write()

    def text(self, name: str) -> str:
        """The token of a name."""
        return self._texts[name]

    def shown(self, name: str) -> Metadata:
        """The metadata of a call with this token; the empty name: without one."""
        return (("authorization", f"Bearer {self.text(name)}"),) if name else ()

    def _write(self) -> None:
        new = self.path.with_suffix(".new")
        new.write_text("".join(f"{token.line()}\n" for token in self._tokens.values()))
        new.replace(self.path)


@dataclass(frozen=True, slots=True)
class GuardedServer:
    """A server that serves, and what guards it."""

    server: Server
    access: ProcessAccess
    store: CasStore

    @property
    def listen(self) -> str:
        return self.server.listen

    async def set_policy(self, policy: Policy) -> None:
        """Store a policy in place of the present one, whoever may change it."""
        database_id = (await StoredManifest(self.store).refresh()).database_id
        stored = StoredPolicy(self.store, database_id)
        await stored.replace(replace(policy, version=(await stored.refresh()).version))
        await self.access.policies.refresh()


@asynccontextmanager
async def guarded_writer(
    store: ObjectStore, tokens: TokenBook, *, clock: Clock | None = None, **groups: Group
) -> AsyncIterator[GuardedServer]:
    """Serve the database in `store`, which is made if there is none."""
    settings = serve_settings(**groups | {"access": _access(tokens, groups)})
    with _runtime(clock) as runtime:
        with suppress(DatabaseExists):
            await create_database(store, runtime, settings.store)
        async with _guarded(settings, store, runtime) as served:
            writer = await Writer.open(
                store, settings=settings, runtime=runtime, policies=served.access.policies
            )
            async with _serving(writer, served.server):
                yield served


@asynccontextmanager
async def guarded_reader(
    store: ObjectStore, tokens: TokenBook, *, clock: Clock | None = None, **groups: Group
) -> AsyncIterator[GuardedServer]:
    """Serve reads of the database in `store`."""
    named: dict[str, Group] = {
        "database": {"url": "memory://test"},
        "server": {"listen": "127.0.0.1:0"},
        "reader": {"poll_interval_ms": 20, "poll_interval_idle_ms": 50},
    }

    settings = ReaderConfig.model_validate(named | groups | {"access": _access(tokens, groups)})
    with _runtime(clock) as runtime:
        async with _guarded(settings, store, runtime) as served:
            reader = await Reader.open(
                store, settings=settings, runtime=runtime, policies=served.access.policies
            )
            async with _serving(reader, served.server):
                yield served


def _access(tokens: TokenBook, groups: dict[str, Group]) -> Group:
    usual = {"tokens_file": str(tokens.path), "policy_check_ms": POLICY_CHECK_MS}
    return usual | dict(groups.get("access", {}))


@contextmanager
def _runtime(clock: Clock | None) -> Iterator[Runtime]:
    workers = ThreadWorkers(2)
    try:
        yield Runtime(clock=clock or MachineClock(), random=Random(1), workers=workers)
    finally:
        workers.close()


@asynccontextmanager
async def _guarded(
    settings: WriterConfig | ReaderConfig, store: ObjectStore, runtime: Runtime
) -> AsyncIterator[GuardedServer]:
    async with open_access(settings, store, runtime, None) as access:
        await access.load()
        server = Server(
            settings.server,
            runtime,
            limits=settings.limits,
            guard=access.guard,
            open_services=settings.access.open_services,
        )
        try:
            yield GuardedServer(server, access, CasStore(store, runtime, settings.store))
        finally:
            await server.stop()


@asynccontextmanager
async def _serving(role: Writer | Reader, server: Server) -> AsyncIterator[None]:
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(role.run())
        await server.start(role.kv, role.admin, role.watches)
        try:
            yield
        finally:
            await server.stop()
            role.close()
    await role.release()
