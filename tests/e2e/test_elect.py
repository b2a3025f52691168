"""Fail-over without a human: servers that stand by, take over, and step down."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from shalekv.cli.exit_codes import ExitCode
from shalekv_client import Client, Stopping
from tests.kit.processes.child import Child, Line
from tests.kit.processes.elected import WITHIN_S, elected, epochs_of
from tests.kit.processes.load import ONE_ATTEMPT
from tests.kit.processes.processes import Processes
from tests.servers.etcd import EtcdServer

TAKE_OVERS = 5
TAKE_OVERS_SOAK = 50
TAKE_OVER_S = 30.0  # 3 s for the lease and some moments, on a machine that has nothing else to do
SERVERS = 3
SHORT = ("--lease-ttl-ms", "1000")  # where servers take over from each other as often as they can
# Where the writer is to stay, or to hand over: longer than anybody waits for another one.
LONG = ("--lease-ttl-ms", "120000")
STEADY = ("--lease-ttl-ms", "10000")  # no pause of a busy machine moves the writer
ENDS = ("stopped", "ended by an error")  # of a child, which another one may have superseded


def key_of(etcd: EtcdServer, folder: Path) -> str:
    """An election of its own in etcd."""
    return f"etcd://{etcd.address}/test{folder}"


async def take_over_again_and_again(
    processes: Processes, folder: Path, elect: str, count: int
) -> None:
    """Kill -9 whoever serves, so many times."""
    async with elected(processes, folder, *[elect] * SERVERS, seed=count) as group:
        for _ in range(count):
            await group.take_over()
        group.tell()
        assert max(group.durations_s) < TAKE_OVER_S


async def test_take_over_by_a_lease_in_the_bucket(processes: Processes, tmp_path: Path) -> None:
    """Kill -9 of the writer, again and again: another one serves without anybody's help, and every
    acknowledged write is there.
    """
    await take_over_again_and_again(processes, tmp_path / "db", "bucket", TAKE_OVERS)


async def test_take_over_by_a_lease_in_etcd(
    processes: Processes, tmp_path: Path, etcd_server: EtcdServer
) -> None:
    """The same with a lease in etcd."""
    elect = key_of(etcd_server, tmp_path)
    await take_over_again_and_again(processes, tmp_path / "db", elect, TAKE_OVERS)


@pytest.mark.soak
@pytest.mark.timeout(1800)
async def test_take_over_for_long_by_a_lease_in_the_bucket(
    processes: Processes, tmp_path: Path
) -> None:
    """As above, fifty times in a row."""
    await take_over_again_and_again(processes, tmp_path / "db", "bucket", TAKE_OVERS_SOAK)


@pytest.mark.soak
@pytest.mark.timeout(1800)
async def test_take_over_for_long_by_a_lease_in_etcd(
    processes: Processes, tmp_path: Path, etcd_server: EtcdServer
) -> None:
    """As above, fifty times in a row."""
    elect = key_of(etcd_server, tmp_path)
    await take_over_again_and_again(processes, tmp_path / "db", elect, TAKE_OVERS_SOAK)


async def test_an_elector_that_lies(
    processes: Processes, tmp_path: Path, etcd_server: EtcdServer
) -> None:
    """Two servers that are both told that they are elected fence each other, stand by, and come
    back, again and again: the history stays right, since nothing of it rests on the elector.
    """
    elects = ["bucket", key_of(etcd_server, tmp_path)]
    async with elected(processes, tmp_path / "db", *elects, flags=SHORT, seed=2) as group:
        for _ in range(4):
            await group.writes.by_another(group.writes.epoch)
        # One of them may have lost its lease by itself, and have come back before the other.
        async with asyncio.timeout(WITHIN_S):
            while any(len(epochs_of(child)) < 2 for child in group.standing):
                await group.writes.by_another(group.writes.epoch)
        assert all(child.running for child in group.standing)


async def test_a_stop_hands_over_at_once(processes: Processes, tmp_path: Path) -> None:
    """SIGTERM releases the lease when all is durable: the process ends with 0, and another one
    serves without waiting for the lease to lapse. One that stands by ends as well.
    """
    async with elected(processes, tmp_path / "db", *["bucket"] * 2, flags=LONG, seed=3) as group:
        for _ in range(3):
            before, epoch = group.writer, group.writes.epoch
            group.standing.remove(before)
            assert await before.stop() == ExitCode.OK, before.report()
            assert "lease released" in [line["event"] for line in before.lines()], before.report()
            await group.writes.by_another(epoch)
            await group.start(listen=before.listen)
        idle = next(each for each in group.standing if each is not group.writer)
        group.standing.remove(idle)
        assert await idle.stop() == ExitCode.OK, idle.report()


async def test_who_stands_by_says_who_is_elected(processes: Processes, tmp_path: Path) -> None:
    """Calls at a server that stands by are refused with UNAVAILABLE and a reason; nothing of them
    is applied, and the address of the holder is told.
    """
    async with elected(processes, tmp_path / "db", *["bucket"] * 2, flags=LONG, seed=4) as group:
        idle = next(each for each in group.standing if each is not group.writer)
        await idle.line(lambda line: line.get("holder") == group.writer.listen)
        async with Client(idle.listen, retry=ONE_ATTEMPT) as client:
            with pytest.raises(Stopping) as refused:
                await client.put(b"k", b"v")
            assert refused.value.reason == "STANDING_BY"
            assert refused.value.code == "UNAVAILABLE"
            assert refused.value.details.metadata["writer_address"] == group.writer.listen
            with pytest.raises(Stopping):
                await client.status()
            with pytest.raises(Stopping):
                [entry async for entry in client.scan()]


async def test_a_pause_past_the_lease_steps_down(processes: Processes, tmp_path: Path) -> None:
    """A writer that stood still while another took over stands by again in the same process, and
    serves again when it is elected once more; nothing acknowledged is lost.
    """
    async with elected(processes, tmp_path / "db", *["bucket"] * 2, flags=STEADY, seed=5) as group:
        paused, epoch = group.writer, group.writes.epoch
        paused.pause()
        await group.writes.by_another(epoch)
        paused.resume()
        await paused.line(steps_down)
        other, epoch = group.writer, group.writes.epoch
        assert other is not paused
        group.standing.remove(other)
        await other.kill()
        await group.writes.by_another(epoch)
        assert group.writer is paused, paused.report()
        assert paused.running


async def test_a_writer_that_was_opened_by_force_ends(processes: Processes, tmp_path: Path) -> None:
    """A writer without an elector takes over as ever, and the elected one stands by; later that one
    takes over in turn, and the other, which has nobody to ask, ends as fenced.
    """
    async with elected(processes, tmp_path / "db", "bucket", flags=STEADY, seed=6) as group:
        epoch = group.writes.epoch
        forced = await processes.serve(f"file://{group.folder}", create=False)
        await group.standing[0].line(is_fenced)
        assert await forced.exited() == ExitCode.FENCED, forced.report()
        await group.writes.by_another(epoch + 1)


async def test_a_key_deleted_by_hand_makes_the_writer_step_down(
    processes: Processes, tmp_path: Path, etcd_server: EtcdServer
) -> None:
    """Who deletes the lease in etcd moves the writer: the one that has served stands by."""
    elect = key_of(etcd_server, tmp_path)
    async with elected(processes, tmp_path / "db", elect, elect, seed=7) as group:
        before = group.writer
        await asyncio.to_thread(etcd_server.delete, f"test{tmp_path}")
        await before.line(steps_down)
        assert before.running


async def test_children_run_beside_the_writer_alone(processes: Processes, tmp_path: Path) -> None:
    """A compactor and a collector are started where the writer is, and not where one stands by."""
    # Children that have only just begun end late, too, and say so when they are given the time.
    flags = (*STEADY, "--child-grace-ms", "60000", "--with-compactor", "--with-collector")
    async with elected(processes, tmp_path / "db", *["bucket"] * 2, flags=flags, seed=8) as group:
        writer = group.writer
        idle = next(each for each in group.standing if each is not writer)
        await writer.line(is_compactor_started)
        assert not any("child" in line for line in idle.lines()), idle.report()
        writer.pause()
        await idle.line(is_compactor_started)
        writer.resume()
        await ended_children(writer)


async def ended_children(child: Child) -> None:
    """Wait until its compactor and its collector have stopped."""
    for role in ("compactor", "collector"):

        def has_ended(line: Line, role: str = role) -> bool:
            return line.get("role") == role and line.get("event") in ENDS

        await child.line(has_ended)


def is_compactor_started(line: Line) -> bool:
    """Whether a server says that it has started its compactor."""
    return line.get("event") == "child process started" and line.get("child") == "compactor"


def steps_down(line: Line) -> bool:
    """Whether a server says that it has lost its lease, or the database."""
    return line.get("event") in {"lease lost", "stands by again"}


def is_fenced(line: Line) -> bool:
    """Whether an elected server says that it was fenced, and goes on."""
    return line.get("event") == "stands by again" and line.get("reason") == "FENCED"
