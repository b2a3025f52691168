"""Many rounds of concurrent clients against servers that are killed and taken over meanwhile."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from random import Random

from shalekv_client import NotApplied, OutcomeUnknown
from tests.kit.processes.processes import Processes
from tests.linearizability.caller import ANSWERED_S, Board, Caller, Connect
from tests.linearizability.cluster import Cluster, Disruption
from tests.linearizability.history import Recorder
from tests.linearizability.operations import Call, Operation, Reply
from tests.linearizability.tally import Gate, Tally
from tests.linearizability.workload import ALL_KINDS, UNTIED_KINDS, Workload

MOVED_ON_REPLIES = 60


@dataclass(frozen=True, slots=True)
class Plan:
    """How much is done."""

    seed: int
    rounds: int  # at least; they go on until the last disruption is over
    disruptions: int
    kinds: tuple[Disruption, ...] = tuple(Disruption)  # of disruptions, in turn
    lanes: int = 4  # rounds under way at once
    clients: int = 8  # of each round
    loyal: int = 2  # of them: see `Caller`
    operations_min: int = 3  # of each client in a round
    operations_max: int = 9
    tied_share: float = 0.15  # of the rounds


class Campaign:
    """One database, its servers and all clients."""

    def __init__(self, plan: Plan, connect: Connect, *, repeats: bool) -> None:
        """`connect` and `repeats` as of `Caller`."""
        self.histories: list[list[Call]] = []
        self.refused: Counter[str] = Counter()
        self.unknown: Counter[str] = Counter()
        self.load_s = 0.0
        self.cluster: Cluster | None = None
        self.plan = plan
        self._repeats = repeats
        self._random = Random(plan.seed)
        self._board = Board()
        self._callers = [
            [
                Caller(
                    self._board,
                    connect,
                    self._fork(),
                    repeats=repeats,
                    is_loyal=number >= plan.clients - plan.loyal,
                )
                for number in range(plan.clients)
            ]
            for _ in range(plan.lanes)
        ]
        self._rounds = Tally()  # that were begun
        self._replies = Tally()
        self._late_questions = Tally()  # of loyal clients, when all others have ended
        self._gate = Gate()
        self._is_undisturbed = False  # no disruption comes any more

    async def run(self, processes: Processes, folder: Path, *flags: str) -> None:
        """All rounds, with all disruptions; the database is new."""
        cluster = self.cluster = Cluster(processes, folder, self._board, clients=self, flags=flags)
        await cluster.start()
        began_s = time.monotonic()
        async with asyncio.TaskGroup() as tasks:
            for callers in self._callers:
                tasks.create_task(self._run_lane(callers), name="lane")
            tasks.create_task(self._disrupt(cluster), name="disruptions")
        self.load_s = time.monotonic() - began_s
        await cluster.stop()

    def held(self) -> AbstractContextManager[None]:
        """Implements `cluster.Clients`."""
        return self._gate.closed()

    async def quiet(self) -> None:
        """Implements `cluster.Clients`."""
        await self._gate.empty(within_s=ANSWERED_S)

    async def moved_on(self) -> None:
        """Implements `cluster.Clients`."""
        await self._replies.more(MOVED_ON_REPLIES, within_s=ANSWERED_S)
        await self._late_questions.more(self.plan.lanes, within_s=ANSWERED_S)

    @property
    def repeated_count(self) -> int:
        """How often clients have sent an operation again, as its outcome was unknown."""
        return sum(caller.repeated_count for callers in self._callers for caller in callers)

    @property
    def echo_count(self) -> int:
        """How often clients have asked again for an answer, and it was the same."""
        return sum(caller.echo_count for callers in self._callers for caller in callers)

    def summary(self) -> str:
        done = Counter(each.name.lower() for each in self.cluster.done) if self.cluster else {}
        calls = sum(map(len, self.histories))
        unknown = sum(call.reply is None for history in self.histories for call in history)
        return (
            f"seed {self.plan.seed}: {len(self.histories)} rounds, {calls} operations in "
            f"{self.load_s:.1f} s, disruptions {dict(done)}, of unknown outcome {unknown} "
            f"({dict(self.unknown)}), not applied {dict(self.refused)}, "
            f"repeated {self.repeated_count}, asked again {self.echo_count}"
        )

    async def _run_lane(self, callers: list[Caller]) -> None:
        while self._rounds.count < self.plan.rounds or not self._is_undisturbed:
            self._rounds.add()
            await self._run_round(callers, b"%d/" % self._rounds.count)
        for caller in callers:
            await caller.close()

    async def _run_round(self, callers: list[Caller], prefix: bytes) -> None:
        """Fresh keys, all clients at once; in the end each key is read."""
        plan, random = self.plan, self._fork()
        tied = random.random() < plan.tied_share
        kinds = ALL_KINDS if tied else UNTIED_KINDS
        workload = Workload(random, prefix, tied=tied, kinds=kinds)
        recorder = Recorder()
        busy = plan.clients - plan.loyal

        async def client(number: int) -> None:
            nonlocal busy
            for _ in range(random.randint(plan.operations_min, plan.operations_max)):
                async with self._gate.passed():
                    await self._call(number, callers[number], workload.draw(), recorder, workload)
            busy -= 1

        async def loyal_client(number: int) -> None:
            while busy:
                read = workload.draw_read()
                await self._call(number, callers[number], read, recorder, workload)
            # All others have ended: an old server that answers this by what it knows is found out.
            self._late_questions.add()
            # Who repeats a write until its outcome is known would wait for the old server.
            draw = workload.draw_read if self._repeats else workload.draw_question
            await self._call(number, callers[number], draw(), recorder, workload)

        async with asyncio.TaskGroup() as tasks:
            for number, caller in enumerate(callers):
                run = loyal_client if caller.is_loyal else client
                tasks.create_task(run(number), name=f"client {number}")
        async with asyncio.timeout(ANSWERED_S):
            for operation in workload.last_reads():
                while await self._call(0, callers[0], operation, recorder, workload) is None:
                    pass  # the server has changed
        self.histories.append(recorder.history())

    async def _call(
        self,
        number: int,
        caller: Caller,
        operation: Operation,
        recorder: Recorder,
        workload: Workload,
    ) -> Reply | None:
        ticket = recorder.begin(number, operation)
        try:
            reply = await caller.call(operation)
        except NotApplied as error:
            recorder.forget(ticket)
            self.refused[error.reason or error.code] += 1
        except OutcomeUnknown as error:
            self.unknown[error.reason or type(error).__name__] += not operation.is_read
        else:
            recorder.answer(ticket, reply)
            self._replies.add()
            workload.learn(operation, reply)
            return reply
        return None

    async def _disrupt(self, cluster: Cluster) -> None:
        """Disruptions in turn, with a random number of rounds between them."""
        apart = self.plan.rounds / (self.plan.disruptions + 1)
        for number in range(self.plan.disruptions):
            await self._rounds.more(round(apart * self._random.uniform(0.3, 1.3)))
            await cluster.disrupt(self.plan.kinds[number % len(self.plan.kinds)])
        self._is_undisturbed = True

    def _fork(self) -> Random:
        return Random(self._random.getrandbits(64))
