"""What real servers answer to concurrent clients is linearizable, whatever happens to the servers.

Every history of every key is judged by our checker and by Porcupine (I14, I15). Each test prints
how much was done; the seed decides what clients and disruptions do, but not the order in time.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.kit.processes.processes import Processes
from tests.linearizability.caller import Connect
from tests.linearizability.campaign import Campaign, Plan
from tests.linearizability.client_sender import ClientSender
from tests.linearizability.cluster import Disruption
from tests.linearizability.judgement import judge_all, plant_all
from tests.linearizability.raw_sender import CommittedSender, RawSender
from tests.linearizability.wrong_senders import DoublingAdder, LosingWriter, StaleReader

FOUR_IN_FLIGHT = ("--max-parallel-writes", "4")
# What a client may be told; the last by itself, when it had no time left to send.
NOT_APPLIED = {"FENCED", "STOPPING", "DEADLINE_PASSED", "DEADLINE_EXCEEDED"}
WRONG_ROUNDS = 80


async def _run(campaign: Campaign, processes: Processes, folder: Path, *flags: str) -> None:
    """Run a campaign, judge it, and print what it was."""
    await campaign.run(processes, folder, *flags)
    sys.stdout.write(f"{campaign.summary()}\n")
    judgement = judge_all(campaign.histories)
    sys.stdout.write(f"{judgement.text}\n")
    assert not judgement.refused, f"{campaign.summary()}\n{judgement.refused[0]}"
    assert campaign.refused.keys() <= NOT_APPLIED, campaign.summary()
    sys.stdout.write(f"{plant_all(campaign.plan.seed, judgement.parts)}\n")


async def test_calls_of_grpc(processes: Processes, tmp_path: Path) -> None:
    """Clients that repeat nothing see a linearizable database through kills and take-overs, with
    every write of unknown outcome done once or never.
    """
    campaign = Campaign(Plan(seed=1, rounds=180, disruptions=8), RawSender, repeats=False)
    await _run(campaign, processes, tmp_path / "db")
    assert campaign.unknown.total() > 0


async def test_calls_of_grpc_with_parallel_uploads(processes: Processes, tmp_path: Path) -> None:
    """The same holds, over several keys as well, while objects of the log land out of order."""
    plan = Plan(seed=2, rounds=100, disruptions=4, tied_share=0.5)
    campaign = Campaign(plan, RawSender, repeats=False)
    await _run(campaign, processes, tmp_path / "db", *FOUR_IN_FLIGHT)


async def test_committed_reads(processes: Processes, tmp_path: Path) -> None:
    """Reads at COMMITTED are linearizable, too, as long as servers die and nobody takes over."""
    plan = Plan(seed=5, rounds=60, disruptions=2, kinds=(Disruption.KILL,))
    campaign = Campaign(plan, CommittedSender, repeats=False)
    await _run(campaign, processes, tmp_path / "db")


async def test_calls_of_the_client(processes: Processes, tmp_path: Path) -> None:
    """Clients that repeat by idempotency keys learn the outcome of every write; each counts once,
    and who asks again gets the first answer, also from the next server.
    """
    campaign = Campaign(Plan(seed=3, rounds=120, disruptions=4), ClientSender, repeats=True)
    await _run(campaign, processes, tmp_path / "db")
    assert all(call.reply is not None for history in campaign.histories for call in history)
    assert min(campaign.repeated_count, campaign.echo_count) > 0


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", range(101, 106))
@pytest.mark.parametrize(
    ("connect", "flags"),
    [
        pytest.param(RawSender, (), id="grpc"),
        pytest.param(RawSender, FOUR_IN_FLIGHT, id="grpc-four-in-flight"),
        pytest.param(ClientSender, (), id="client"),
        pytest.param(ClientSender, FOUR_IN_FLIGHT, id="client-four-in-flight"),
    ],
)
async def test_calls_for_long(
    processes: Processes,
    tmp_path: Path,
    connect: Connect,
    flags: tuple[str, ...],
    seed: int,
) -> None:
    """As above, with longer rounds, many more of them, and a log that has grown."""
    plan = Plan(
        seed,
        rounds=600,
        disruptions=24,
        operations_min=12,
        operations_max=25,
        tied_share=0.2,
    )
    campaign = Campaign(plan, connect, repeats=connect is ClientSender)
    await _run(campaign, processes, tmp_path / "db", *flags)


@pytest.mark.parametrize("connect", [StaleReader, LosingWriter, DoublingAdder])
async def test_broken_promise_is_found(
    processes: Processes, tmp_path: Path, connect: Connect
) -> None:
    """Stale reads, lost writes and doubled additions are found in what real servers answer."""
    plan = Plan(seed=4, rounds=WRONG_ROUNDS, disruptions=0)
    campaign = Campaign(plan, connect, repeats=False)
    await campaign.run(processes, tmp_path / "db")
    judgement = judge_all(campaign.histories)
    sys.stdout.write(f"{campaign.summary()}\n{judgement.text}: {len(judgement.refused)} refused\n")
    assert judgement.refused
