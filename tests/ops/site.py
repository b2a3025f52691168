"""Databases whose processes tell their metrics to Prometheus, and ordinary load on them.

main        on a real S3 server: a writer with compactor and collector, a reader, and a reader of
            two processes; each store behind a proxy of its own
quorum      the same store, with the log in three safekeepers
guarded     in a folder, with TLS, tokens, a policy, an audit log, and traces
elected     in a folder, with an elector
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

from shalekv.clock import LoopClock
from shalekv_client import Client, ShaleKVError, TlsOptions
from tests.kit.certificates import Authority
from tests.kit.processes.child import Child
from tests.kit.processes.processes import Processes
from tests.ops.prometheus import Prometheus, prometheus
from tests.servers.object_stores import versitygw
from tests.servers.process import HOST, free_port
from tests.servers.proxy import Proxy, proxy_before

BUCKET = "watched"
SLOW_MS = 1_000  # as by default: slower requests and calls are told about
SAFEKEEPERS = 3
PRICED = ("--prices", "s3")
# A small budget, so that its limits are met soon.
SMALL = ("--memory-bytes", str(128 << 20))
CALLS_AT_ONCE = 10
PAUSE_MS = 800  # of each of them: 12 calls a second and database, 50 in all
TIMEOUT_MS = 3_000  # of a call
KEYS = 2_000
VALUE = b"x" * 200
CLOCK = LoopClock()


@dataclass(slots=True)
class Site:
    """Starts processes, each at ports of its own that it keeps, and lets Prometheus ask them."""

    processes: Processes
    folder: Path
    prometheus: Prometheus
    slow_ms: int
    children: dict[str, Child] = field(default_factory=dict)
    _metrics: dict[str, str] = field(default_factory=dict)
    _listens: dict[str, str] = field(default_factory=dict)

    def address(self, name: str) -> str:
        """HOST:PORT of the calls of a process."""
        return self._listens.setdefault(name, f"{HOST}:{free_port()}")

    async def start(
        self,
        job: str,
        name: str,
        *argv: str,
        env: Mapping[str, str] | None = None,
        scheme: str = "http",
    ) -> Child:
        """Start a process, or start it again; it serves when this returns."""
        if name not in self._metrics:
            self._metrics[name] = f"{HOST}:{free_port()}"
            self.prometheus.watch(f"shalekv-{job}", name, self._metrics[name], scheme=scheme)
        flags = ["--listen", self.address(name), "--metrics", self._metrics[name]]
        flags += ["--slow-ms", str(self.slow_ms), "--log-format", "json"]
        child = self.children[name] = self.processes.start(*argv, *flags, env=env)
        await child.ready()
        return child


def by_way_of(proxy: Proxy) -> dict[str, str]:
    """Settings with which a process reaches the bucket."""
    return proxy.server.environment | {"SHALEKV_STORE__ENDPOINT_URL": proxy.server.endpoint}


@dataclass(slots=True)
class Main:
    """A writer and two readers in a bucket."""

    site: Site
    proxy: Proxy  # of the writer, and of one reader
    far: Proxy  # of the other reader
    url: str = f"s3://{BUCKET}/main"

    async def start(self) -> None:
        await self.start_writer()
        await self.start_reader("reader-1", self.far)
        await self.start_reader("reader-2", self.proxy, "--processes", "2")

    async def start_writer(self, *flags: str) -> Child:
        env = by_way_of(self.proxy)
        argv = ("serve", "--create", "--url", self.url, *PRICED, *SMALL, *flags)
        return await self.site.start("main", "writer", *argv, env=env)

    async def start_reader(self, name: str, proxy: Proxy, *flags: str) -> Child:
        env = by_way_of(proxy)
        argv = ("reader", "--url", self.url, *PRICED, *flags)
        return await self.site.start("main", name, *argv, env=env)

    @property
    def addresses(self) -> list[str]:
        return [self.site.address(name) for name in ("writer", "reader-1", "reader-2")]


@dataclass(slots=True)
class Quorum:
    """A writer whose log is in three safekeepers."""

    site: Site
    proxy: Proxy
    url: str = f"s3://{BUCKET}/quorum"

    async def start(self) -> None:
        await asyncio.gather(*map(self.start_safekeeper, range(SAFEKEEPERS)))
        await self.start_writer()

    async def start_safekeeper(self, number: int) -> Child:
        name = f"safekeeper-{number}"
        data = self.site.folder / name
        argv = ("safekeeper", "--data", str(data), "--url", f"s3://{BUCKET}")
        env = by_way_of(self.proxy)
        return await self.site.start("safekeepers", name, *argv, env=env)

    async def start_writer(self, *flags: str) -> Child:
        members = ",".join(self.site.address(f"safekeeper-{n}") for n in range(SAFEKEEPERS))
        argv = ("serve", "--create", "--url", self.url, "--wal", "quorum", "--safekeepers", members)
        env = by_way_of(self.proxy)
        return await self.site.start(
            "quorum", "writer-quorum", *argv, *PRICED, *SMALL, *flags, env=env
        )

    @property
    def addresses(self) -> list[str]:
        return [self.site.address("writer-quorum")]


@dataclass(slots=True)
class Guarded:
    """A writer with TLS, tokens, an audit log and traces."""

    site: Site
    authority: Authority
    tokens: dict[str, str]  # by name; "ann" may do everything

    async def start(self) -> None:
        self.renew(90)
        await self.start_writer()
        await self.run("role", "set", "user", "--allow", "read,write")
        await self.run("grant", "set", "token:bob", "--role", "user")
        await self.run("grant", "set", "token:greedy", "--role", "user", "--calls-per-s", "1")

    def renew(self, days: float) -> None:
        """Give it a certificate for so many days."""
        self.authority.issue("localhost", HOST, valid=(-1, days)).write(self.folder, "server")

    async def start_writer(self, *flags: str) -> Child:
        folder = self.folder
        argv = ["serve", "--create", "--url", f"file://{folder}/db", "--prices", "free", *SMALL]
        argv += ["--tls-cert", f"{folder}/server.crt", "--tls-key", f"{folder}/server.key"]
        argv += ["--tokens-file", f"{folder}/tokens", "--admins", "token:ann"]
        audit = () if "--audit-log" in flags else ("--audit-log", f"{folder}/audit.log")
        return await self.site.start("guarded", "guarded", *argv, *audit, *flags, scheme="https")

    @property
    def folder(self) -> Path:
        return self.site.folder / "guarded"

    @property
    def address(self) -> str:
        return self.site.address("guarded").replace(HOST, "localhost")

    def client(self, name: str) -> Client:
        """A client with the token of `name`."""
        tls = TlsOptions(ca=self.folder / "ca.crt")
        token = self.tokens[name]
        return Client(self.address, tls=tls, access_token=token, timeout_ms=TIMEOUT_MS)

    async def run(self, *argv: str) -> None:
        """Run a command as the administrator."""
        env = {"SHALEKV_ADDR": self.address, "SHALEKV_TLS_CA": f"{self.folder}/ca.crt"}
        env["SHALEKV_TOKEN"] = self.tokens["ann"]
        await self.site.processes.run(*argv, env=env, code=0)


@dataclass(slots=True)
class Elected:
    """A writer that stands by when it was fenced."""

    site: Site

    @property
    def url(self) -> str:
        return f"file://{self.site.folder}/elected"

    async def start(self) -> None:
        lease = ("--lease-ttl-ms", "6000")  # on a machine that is busy
        argv = ["serve", "--create", "--url", self.url, "--elect", "bucket", *lease, *SMALL]
        argv += ["--wal-trigger-age-ms", "2000"]  # so that there are SSTs
        await self.site.start("elected", "elected", *argv)

    @property
    def addresses(self) -> list[str]:
        return [self.site.address("elected")]


@dataclass(slots=True)
class Databases:
    """All of them, and the Prometheus that watches."""

    prometheus: Prometheus
    main: Main
    quorum: Quorum
    guarded: Guarded
    elected: Elected

    async def start(self) -> None:
        """Start every process, and let each database get its first calls."""
        each = (self.main, self.quorum, self.guarded, self.elected)
        await asyncio.gather(*(database.start() for database in each))

    @asynccontextmanager
    async def loaded(self) -> AsyncIterator[None]:
        """Ordinary load on every database while entered."""
        async with AsyncExitStack() as stack:
            found = (self.main.addresses, self.quorum.addresses, self.elected.addresses)
            clients = [Client(addresses, timeout_ms=TIMEOUT_MS) for addresses in found]
            clients.append(self.guarded.client("bob"))
            for client in clients:
                await stack.enter_async_context(client)
            await stack.enter_async_context(loaded(*clients))
            yield


@asynccontextmanager
async def databases(
    processes: Processes, folder: Path, speed: float, *, slow_ms: int = SLOW_MS
) -> AsyncIterator[Databases]:
    """A Prometheus, an S3 server, and databases of which no process runs yet."""
    authority = Authority()
    (folder / "guarded").mkdir()
    authority.write(folder / "guarded")
    tokens = await _tokens(processes, folder / "guarded", "ann", "bob", "greedy", "stranger")
    with (
        versitygw() as s3,
        prometheus(speed, folder / "guarded" / "ca.crt", tokens["ann"]) as watching,
    ):
        s3.create_bucket(BUCKET)
        site = Site(processes, folder, watching, slow_ms)
        async with proxy_before(s3) as near, proxy_before(s3) as far, proxy_before(s3) as archive:
            yield Databases(
                watching,
                Main(site, near, far),
                Quorum(site, archive),
                Guarded(site, authority, tokens),
                Elected(site),
            )


async def _tokens(processes: Processes, folder: Path, *names: str) -> dict[str, str]:
    made = {}
    for name in names:
        done = await processes.run("token", "create", name, "--file", f"{folder}/tokens", code=0)
        made[name] = done.stdout().strip()
    return made


@asynccontextmanager
async def loaded(*clients: Client) -> AsyncIterator[None]:
    """Ordinary load while entered, through each client, whatever it meets."""
    async with asyncio.TaskGroup() as tasks:
        started = [
            tasks.create_task(_call_on(client, Random(number)))
            for client in clients
            for number in range(CALLS_AT_ONCE)
        ]
        try:
            yield
        finally:
            for task in started:
                task.cancel()


async def _call_on(client: Client, random: Random) -> None:
    while True:
        key = b"%s/%d" % (random.choice((b"user", b"order", b"session")), random.randrange(KEYS))
        with suppress(ShaleKVError):
            await _call(client, key, random.random())
        await CLOCK.sleep_ms(PAUSE_MS)


async def _call(client: Client, key: bytes, chance: float) -> None:
    if chance < 0.4:
        await client.put(key, VALUE)
    elif chance < 0.8:
        await client.get(key)
    elif chance < 0.9:
        async for _ in client.scan(start=key, limit=10):
            pass
    elif chance < 0.95:
        await client.add(b"count/" + key[:6])
    else:
        await client.delete(key)
