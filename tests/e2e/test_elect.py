"""Fail-over without a human: standby servers take over, and step down."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from shalekv.cli.console.exit_codes import ExitCode
from shalekv_client import Client, RetryPolicy, Stopping
from tests.kit.constants import variables
from tests.kit.processes.child import Child, Line, event, is_epoch_won
from tests.kit.processes.cluster import ALONE, Cluster
from tests.kit.processes.history import History
from tests.kit.processes.load import ONE_ATTEMPT, Persistent, check_archived
from tests.kit.processes.processes import Processes
from tests.kit.processes.scraping import fetched, scraped
from tests.kit.seeds import random_of, run_seed
from tests.servers.kubernetes import NAMESPACE, KubernetesApi
from tests.servers.process import free_port
from tests.servers.record_stores import EtcdServer

BETWEEN_WRITES = 20
PATIENT = RetryPolicy(attempts_max=1_000)  # for a standby that is elected later


@dataclass(slots=True)
class Elected:
    """Servers on one database; one of them serves."""

    cluster: Cluster
    flags: tuple[str, ...]
    writes: Persistent
    env: Mapping[str, str]
    servers: list[Child] = field(default_factory=list)

    async def start(self, *flags: str, listen: str = "") -> Child:
        listen = listen or f"127.0.0.1:{free_port()}"  # which is kept for the one that comes back
        child = await self.cluster.serve("--listen", listen, *self.flags, *flags, env=self.env)
        self.servers.append(child)
        return child

    @property
    def writer(self) -> Child:
        return next(each for each in self.servers if self.writes.epoch in epochs_of(each))

    @property
    def idle(self) -> Child:
        return next(each for each in self.servers if each is not self.writer)

    async def take_over(self, *, is_killed: bool = True) -> Child:
        """End the one that serves; another one takes over, and the first one comes back."""
        await self.writes.more(BETWEEN_WRITES)
        before, epoch = self.writer, self.writes.epoch
        self.servers.remove(before)
        if is_killed:
            await before.kill()
        else:
            assert await before.stop() == ExitCode.OK, before.report()
        await self.writes.by_another(epoch)
        await self.start(listen=before.listen)
        return before

    async def end_others(self) -> Child:
        """End all servers but the one that serves, so that nothing takes over from it."""
        writer = self.writer
        for other in [each for each in self.servers if each is not writer]:
            self.servers.remove(other)
            assert await other.stop() == ExitCode.OK, other.report()
        return writer


@asynccontextmanager
async def elected(
    cluster: Cluster, *elects: str, flags: Sequence[str] = (), env: Mapping[str, str] | None = None
) -> AsyncIterator[Elected]:
    """Run a server for each of `elects`, and clients that write to the elected one.

    At the end, compare what all clients know with the contents of the database.
    """
    writes = Persistent(History(run_seed()), [], random_of("elected"), clients=4)
    # Later flags win: a test may have children all the same.
    group = Elected(cluster, ("--elect", elects[0], *ALONE, *flags), writes, env or {})
    await asyncio.gather(*(group.start("--elect", elect) for elect in elects))
    writes.addresses = [child.listen for child in group.servers]
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(writes.run())
        await writes.more(1)
        yield group
        await writes.more(BETWEEN_WRITES)
        writes.over.set()
    writer = await group.end_others()
    await check_archived(cluster.folder, writer, writes.history, retry=PATIENT)


def epochs_of(child: Child) -> list[int]:
    return [int(line["epoch"]) for line in child.lines() if is_epoch_won(line)]


TAKE_OVERS, TAKE_OVERS_SOAK = 1, 50
SHORT = ("--lease-ttl-ms", "1000")  # where servers may take over from each other at any moment
STEADY = ("--lease-ttl-ms", "4000")
LONG = ("--lease-ttl-ms", "120000")  # where a take-over does not wait for the lease
ENDS = ("lost", "fenced", "failed")
METRICS = ("--metrics", "127.0.0.1:0")
LEASE = "shale.db"
COMPACTOR, COLLECTOR = "compactor", "collector"


def key_of(etcd: EtcdServer, folder: Path) -> str:
    return f"etcd://{etcd.address}/test{folder}"


def in_kubernetes(api: KubernetesApi) -> tuple[str, str, str]:
    """The URL of the Lease, and the flags beside that."""
    elect = f"kubernetes://{NAMESPACE}/{LEASE}"
    return elect, "--kubernetes-credentials-path", api.credentials


async def take_over(cluster: Cluster, elect: str, count: int, *flags: str) -> None:
    async with elected(cluster, *[elect] * 3, flags=(*SHORT, *flags)) as group:
        for _ in range(count):
            await group.take_over()


@pytest.mark.parametrize(
    "count", [TAKE_OVERS, pytest.param(TAKE_OVERS_SOAK, marks=pytest.mark.soak)]
)
@pytest.mark.timeout(1800)
async def test_take_over_by_a_lease_in_the_bucket(
    processes: Processes, tmp_path: Path, count: int
) -> None:
    """Another server serves without anybody's help, and every acknowledged write is there."""
    await take_over(Cluster(processes, tmp_path), "bucket", count)


@pytest.mark.soak
@pytest.mark.timeout(1800)
async def test_take_over_for_long_by_a_lease_in_etcd(
    processes: Processes, tmp_path: Path, etcd_server: EtcdServer
) -> None:
    """Fifty takeovers in a row succeed."""
    elect = key_of(etcd_server, tmp_path)
    await take_over(Cluster(processes, tmp_path), elect, TAKE_OVERS_SOAK)


@pytest.mark.soak
@pytest.mark.timeout(1800)
async def test_take_over_for_long_by_a_lease_of_kubernetes(
    processes: Processes, tmp_path: Path, kubernetes: KubernetesApi
) -> None:
    """The same holds for processes that find the API server as in a pod."""
    elect, *flags = in_kubernetes(kubernetes)
    cluster = Cluster(processes, tmp_path, env=kubernetes.environment)
    await take_over(cluster, elect, TAKE_OVERS_SOAK, *flags)


async def test_take_over_by_a_lease_in_etcd(
    processes: Processes, tmp_path: Path, etcd_server: EtcdServer
) -> None:
    """By a kill; and when the lease is deleted by hand, the writer becomes a standby, and does not
    end.
    """
    elect = key_of(etcd_server, tmp_path)
    cluster = Cluster(processes, tmp_path)
    await take_over_and_step_down(cluster, elect, lambda: etcd_server.delete(f"test{tmp_path}"))


async def test_take_over_by_a_lease_of_kubernetes(
    processes: Processes, tmp_path: Path, kubernetes: KubernetesApi
) -> None:
    """The same holds as in etcd, for processes that find the API server as in a pod."""
    elect, *flags = in_kubernetes(kubernetes)
    cluster = Cluster(processes, tmp_path, env=kubernetes.environment)
    await take_over_and_step_down(cluster, elect, lambda: kubernetes.delete(LEASE), *flags)


async def take_over_and_step_down(
    cluster: Cluster, elect: str, delete: Callable[[], None], *flags: str
) -> None:
    async with elected(cluster, elect, elect, flags=(*SHORT, *METRICS, *flags)) as group:
        await group.take_over()
        before = group.writer
        await asyncio.to_thread(delete)
        await before.line(steps_down)
        assert before.running
        samples = await scraped(before)
        assert sum(samples[f'elections_total{{event="{event}"}}'] for event in ENDS) > 0


async def test_a_server_outside_of_kubernetes_ends_at_once(
    processes: Processes, tmp_path: Path, kubernetes: KubernetesApi
) -> None:
    """So does one that may not use the Lease: with the exit code of a setting, and a line with the
    missing part.
    """
    kubernetes.verbs.clear()
    outside, forbidden = (
        processes.start_serve(
            f"file://{tmp_path}/db", "--elect", *in_kubernetes(kubernetes), env=env
        )
        for env in ({}, kubernetes.environment)
    )
    for child, problem in ((outside, "works in a pod of Kubernetes"), (forbidden, "A Role of")):
        assert await child.exited() == ExitCode.USAGE, child.report()
        assert problem in child.lines()[-1]["problem"]


async def test_take_over_with_safekeepers(processes: Processes, tmp_path: Path) -> None:
    """A standby takes over a log on safekeepers, one of which is killed."""
    cluster = await Cluster.started(processes, tmp_path)
    async with elected(cluster, "bucket", "bucket", flags=SHORT) as group:
        await cluster.kill([0])
        await group.take_over()
        await cluster.start_node(0)


async def test_an_elector_that_lies(
    processes: Processes, tmp_path: Path, etcd_server: EtcdServer
) -> None:
    """Two servers that are both elected fence each other, become standbys, and come back: the
    history stays right, since nothing of it rests on the elector.
    """
    elects = ["bucket", key_of(etcd_server, tmp_path)]
    async with elected(Cluster(processes, tmp_path), *elects, flags=SHORT) as group:
        while any(len(epochs_of(child)) < 2 for child in group.servers):
            await group.writes.by_another(group.writes.epoch)
        assert all(child.running for child in group.servers)


async def test_a_stop_hands_over_at_once(processes: Processes, tmp_path: Path) -> None:
    """A standby refuses calls, and names the elected server. SIGTERM releases the lease when all is
    durable: the process ends with 0, and the other serves without waiting for the lease to lapse. A
    standby ends as well. It lives, is not ready, and shows metrics.
    """
    flags = (*LONG, *METRICS)
    async with elected(Cluster(processes, tmp_path), "bucket", "bucket", flags=flags) as group:
        await group.idle.line(lambda line: line.get("holder") == group.writer.listen)
        async with Client(group.idle.listen, retry=ONE_ATTEMPT) as client:
            with pytest.raises(Stopping) as refused:
                await client.put(b"k", b"v")
            assert (refused.value.code, refused.value.reason) == ("UNAVAILABLE", "STANDING_BY")
            assert refused.value.details.metadata["writer_address"] == group.writer.listen
            with pytest.raises(Stopping):
                await client.status()
            with pytest.raises(Stopping):
                [entry async for entry in client.scan()]
        assert (await fetched(group.idle, "/livez")).status == 200
        assert (await fetched(group.idle, "/readyz")).status == 503
        samples = [await scraped(each) for each in (group.writer, group.idle)]
        assert [each["serving"] for each in samples] == [1, 0]
        assert [each['elections_total{event="started"}'] for each in samples] == [1, 0]
        before = await group.take_over(is_killed=False)
        assert any(map(event("lease released"), before.lines())), before.report()


async def test_a_pause_past_the_lease_steps_down(processes: Processes, tmp_path: Path) -> None:
    """A writer that was paused while another took over becomes a standby in the same process, its
    children end, and it serves again when it is elected once more. Children run beside the writer
    alone.
    """
    # Children that have just begun end late, too, and log it if they have the time.
    flags = (*STEADY, "--with-compactor", "--with-collector")
    env = variables({"shalekv.cli.process.supervisor:GRACE_MS": 60_000})
    cluster = Cluster(processes, tmp_path)
    async with elected(cluster, "bucket", "bucket", flags=flags, env=env) as group:
        paused, other, epoch = group.writer, group.idle, group.writes.epoch
        await paused.line(is_compactor_started)
        assert not any("child" in line for line in other.lines()), other.report()
        paused.pause()
        await group.writes.by_another(epoch)
        await other.line(is_compactor_started)
        paused.resume()
        await paused.line(steps_down)
        await ended_children(paused)
        epoch = group.writes.epoch
        group.servers.remove(other)
        await other.kill()
        await group.writes.by_another(epoch)
        assert paused.running


async def test_a_writer_that_was_opened_by_force_ends(processes: Processes, tmp_path: Path) -> None:
    """A writer without an elector takes over as always, and the elected one becomes a standby;
    later that one takes over in turn, and the other, without an elector, ends as fenced.
    """
    flags = (*SHORT, *METRICS)
    async with elected(Cluster(processes, tmp_path), "bucket", flags=flags) as group:
        epoch = group.writes.epoch
        forced = await group.cluster.serve(create=False)
        await group.servers[0].line(is_fenced)
        assert await forced.exited() == ExitCode.FENCED, forced.report()
        await group.writes.by_another(epoch + 1)
        samples = await scraped(group.servers[0])
        assert samples['elections_total{event="fenced"}'] == samples["fenced_total"] > 0
        assert samples['elections_total{event="started"}'] > samples["fenced_total"]


async def ended_children(child: Child) -> None:
    """Wait until its compactor and its collector have ended, which another may have superseded."""
    for role in (COMPACTOR, COLLECTOR):

        def has_ended(line: Line, role: str = role) -> bool:
            ends = ("stopped", "ended by an error")
            return line.get("role") == role and line.get("event") in ends

        await child.line(has_ended)


def is_compactor_started(line: Line) -> bool:
    return line.get("event") == "child process started" and line.get("child") == COMPACTOR


def steps_down(line: Line) -> bool:
    """Return whether a server has logged that it has lost its lease, or the database."""
    return line.get("event") in {"lease lost", "standing by again"}


def is_fenced(line: Line) -> bool:
    return line.get("event") == "standing by again" and line.get("reason") == "FENCED"
