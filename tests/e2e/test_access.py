"""The access policy of processes: turned on while they run, kept by a successor, and recovered."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from shalekv.cli.console.exit_codes import ExitCode
from shalekv_client import (
    Client,
    PermissionDenied,
    RetryPolicy,
    ShaleKVError,
    Unauthenticated,
    Watch,
)
from tests.kit.processes.child import Child, event
from tests.kit.processes.cluster import ALONE
from tests.kit.processes.processes import Processes
from tests.kit.processes.scraping import fetched, scraped

CHECK_MS = 200
WITHIN_S = 120.0
NEVER_LAPSES = ("--lease-ttl-ms", "12000")  # though a busy machine renews it late
ONCE = RetryPolicy(attempts_max=1)
REFUSED = (PermissionDenied, Unauthenticated)


@dataclass(slots=True)
class Guarded:
    """A database in a folder, the tokens of its users, and the commands that they give."""

    processes: Processes
    folder: Path
    tokens: dict[str, str]

    @classmethod
    async def create(cls, processes: Processes, folder: Path, *names: str) -> Guarded:
        guarded = cls(processes, folder, {})
        for name in names:
            made = await processes.run("token", "create", name, "--file", guarded.file, code=0)
            guarded.tokens[name] = made.stdout().strip()
        return guarded

    @property
    def url(self) -> str:
        return f"file://{self.folder}/db"

    @property
    def file(self) -> str:
        return f"{self.folder}/tokens"

    @property
    def flags(self) -> tuple[str, ...]:
        return ("--tokens-file", self.file, "--policy-check-ms", str(CHECK_MS))

    async def run(self, server: Child, name: str, *argv: str, code: int = 0) -> Child:
        """Run a command that talks to a server, with the token of a user; "": without one."""
        env = {"SHALEKV_ADDR": server.listen}
        if name:
            env["SHALEKV_TOKEN"] = self.tokens[name]
        return await self.processes.run(*argv, env=env, code=code)

    @asynccontextmanager
    async def client(self, server: Child, name: str) -> AsyncIterator[Client]:
        token = self.tokens.get(name)
        async with Client(
            server.listen, access_token=token, insecure_token=token is not None, retry=ONCE
        ) as client:
            yield client


async def until(is_done: Callable[[], Awaitable[bool]]) -> None:
    """Ask again and again until it is so."""
    async with asyncio.timeout(WITHIN_S):
        while not await is_done():
            pass


async def is_refused(call: Awaitable[object]) -> bool:
    try:
        await call
    except REFUSED:
        return True
    return False


async def read_to_the_end(watch: Watch) -> None:
    async with asyncio.timeout(WITHIN_S):
        async for _ in watch:
            pass


async def test_a_running_database_is_closed(processes: Processes, tmp_path: Path) -> None:
    """Roles are prepared while everything is open, and enforced by one command. The writer does so
    at once; a reader without a call to the writer, which is dead by then; and open watches end.
    Metrics are shown to whom a role is granted, without the names of others.
    """
    guarded = await Guarded.create(processes, tmp_path, "ann", "bob")
    writer = await processes.serve(guarded.url, *ALONE, *guarded.flags)
    reader = await processes.read(guarded.url, *guarded.flags, "--metrics", "127.0.0.1:0")
    assert "calls_in_progress" in await scraped(reader)
    async with (
        guarded.client(writer, "") as stranger,
        guarded.client(reader, "") as outsider,
        guarded.client(reader, "bob") as bob,
        bob.watch(start=b"a", end=b"z") as watch,
    ):
        await stranger.put(b"orders/1", b"v")
        await stranger.put(b"secret", b"v")
        outsider.advance(str(stranger.token))
        assert await outsider.get(b"orders/1") is not None
        await guarded.run(writer, "ann", "role", "set", "orders", "--allow", "read:prefix=orders/")
        await guarded.run(writer, "ann", "grant", "set", "token:bob", "--role", "orders")
        # Nobody can lock everybody out by mistake.
        refused = await guarded.run(writer, "ann", "access", "enforce", code=2)
        assert "would lose the verb admin" in refused.stderr()
        await guarded.run(writer, "ann", "grant", "set", "token:ann", "--role", "root")
        assert (await stranger.get(b"secret")) is not None
        await guarded.run(writer, "ann", "access", "enforce")
        assert await is_refused(stranger.get(b"secret"))
        assert await is_refused(stranger.put(b"secret", b"w"))
        await writer.kill()
        await until(lambda: is_refused(outsider.get(b"orders/1")))
        assert (await fetched(reader, "/metrics")).status == 401
        shown = await scraped(reader, token=guarded.tokens["bob"])
        assert shown['refusals_total{reason="UNAUTHENTICATED"}'] > 1
        assert not any("principal=" in name for name in shown)
        with pytest.raises(PermissionDenied):
            await read_to_the_end(watch)
        assert await bob.get(b"orders/1") is not None
        assert await is_refused(bob.get(b"secret"))
        found = await bob.who_am_i()
        assert (found.principal, found.is_enforced) == ("token:bob", True)
        assert [(rule.start, rule.end) for rule in found.rules] == [(b"orders/", b"orders0")]


async def test_a_successor_enforces_the_policy_from_its_first_call(
    processes: Processes, tmp_path: Path
) -> None:
    """A stranger who asks the second server all the time gets no answer before, and none after."""
    guarded = await Guarded.create(processes, tmp_path, "ann")
    flags = (*ALONE, *guarded.flags, "--elect", "bucket", *NEVER_LAPSES)
    first = await processes.serve(guarded.url, *flags)
    await first.line(event("serving"))  # it listens before it is elected
    await guarded.run(first, "ann", "grant", "set", "token:ann", "--role", "root")
    await guarded.run(first, "ann", "access", "enforce")
    await guarded.run(first, "ann", "put", "secret", "v")
    second = processes.start_serve(guarded.url, *flags, create=False)
    standing_by = await second.line(event("standing by"))
    answers = list[object]()

    async def ask() -> bool:
        async with Client(standing_by["listen"], retry=ONCE) as stranger:
            try:
                answers.append(await stranger.get(b"secret"))
            except REFUSED:
                return True
            except ShaleKVError:  # it stands by, or opens the database
                return False
            return True

    assert await first.stop() == ExitCode.OK  # which gives the lease back
    await until(ask)
    assert answers == []
    await second.ready()
    await second.line(event("serving"))
    await guarded.run(second, "ann", "get", "secret")


async def test_a_lock_out_is_ended_by_the_bucket(processes: Processes, tmp_path: Path) -> None:
    """The bucket is the way back in: by one more administrator, or by an open database."""
    guarded = await Guarded.create(processes, tmp_path, "ann", "bob")
    server = await processes.serve(guarded.url, *ALONE, *guarded.flags)
    await guarded.run(server, "", "access", "enforce", "--force")
    locked_out = await guarded.run(server, "ann", "access", "open", code=14)
    assert "verb admin" in locked_out.stderr()
    recovered = await processes.run(
        "access", "recover", "--url", guarded.url, "--admin", "token:ann", code=0
    )
    assert "WARNING" in recovered.stderr()
    assert "token:ann has the role root" in recovered.stderr()
    async with guarded.client(server, "ann") as ann, guarded.client(server, "bob") as bob:

        async def may_administer() -> bool:
            return not await is_refused(ann.access_policy())

        await until(may_administer)
        assert await is_refused(bob.get(b"key"))
        await processes.run("access", "recover", "--url", guarded.url, "--open", code=0)

        async def may_read() -> bool:
            return not await is_refused(bob.get(b"key"))

        await until(may_read)


async def test_each_of_several_processes_enforces_the_policy(
    processes: Processes, tmp_path: Path
) -> None:
    """Connections are spread over them, and a stranger is refused by all. That stays so with the
    first policy that an administrator stores.
    """
    guarded = await Guarded.create(processes, tmp_path, "ann")
    admins = ("--admins", "token:ann", "--no-open-services")
    writer = await processes.serve(guarded.url, *ALONE, *guarded.flags, *admins)
    await guarded.run(writer, "ann", "put", "secret", "v")
    await guarded.run(writer, "ann", "role", "set", "orders", "--allow", "read:prefix=orders/")
    await guarded.run(writer, "", "get", "secret", code=14)
    shared = ("--processes", "2", *guarded.flags, *admins)
    reader = await processes.read(guarded.url, *shared)
    for _ in range(4):
        async with guarded.client(reader, "") as stranger:
            assert await is_refused(stranger.get(b"secret"))
    async with guarded.client(reader, "ann") as ann:
        assert await ann.get(b"secret") is not None
        served = (await ann.status()).processes
    assert [each.number for each in served] == [1, 2]
    assert all(each.calls for each in served)
