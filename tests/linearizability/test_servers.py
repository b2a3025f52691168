"""Replies of real servers to concurrent clients are linearizable while servers die and are
replaced.

Every history of every key is judged by our checker and by Porcupine (I14, I15). Half of the clients
send each operation once; the others repeat it with its idempotency key until they know its outcome,
and send it again later to get the same reply.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from random import Random

from shalekv.cli.console.exit_codes import ExitCode
from shalekv_client import (
    ConnectionLost,
    IdempotencyKeys,
    NotApplied,
    OutcomeUnknown,
    ShaleKVError,
    Stopping,
    Unreachable,
)
from tests.kit.processes.processes import Processes
from tests.kit.seeds import random_of
from tests.kit.timeouts import scaled_timeout_s, until
from tests.linearizability import porcupine
from tests.linearizability.checker import judge, partitions
from tests.linearizability.client import Connection
from tests.linearizability.operations import Call, Get, Operation, Reply
from tests.linearizability.workload import Workload

BUDGET_S = 15.0  # from the first round until the last one begins
DISRUPTIONS = 4  # kills and take-overs, in turn
LANES = 4  # rounds under way at once
CLIENTS = 8  # of each round
OPERATIONS = (3, 9)  # of each client in a round
TIED_SHARE = 0.25  # of the rounds
ECHO_SHARE = 0.05
ECHOES_KEPT = 30
FOUR_IN_FLIGHT = ("--max-parallel-writes", "4")
# Reasons for which nothing was applied; the last is the client's own, when no time was left to
# send.
NOT_APPLIED = {"FENCED", "STOPPING", "DEADLINE_PASSED", "DEADLINE_EXCEEDED"}
# After these there is no use in asking the same process again.
SERVER_GONE = (Stopping, Unreachable, ConnectionLost)
# Porcupine gives a history up after some seconds, which are less work on a busy machine. Our own
# checker decides all of them.
UNDECIDED_SHARE_MAX = 0.1  # of the histories


class Board:
    """The address of the newest server."""

    def __init__(self) -> None:
        self.address = ""
        self.version = 0
        self._changed = asyncio.Condition()

    async def post(self, address: str) -> None:
        async with self._changed:
            self.address, self.version = address, self.version + 1
            self._changed.notify_all()

    async def newer_than(self, version: int) -> None:
        async with asyncio.timeout(scaled_timeout_s(60)), self._changed:
            await self._changed.wait_for(lambda: self.version > version)


class Round:
    """Fresh keys, and what clients did with them. Moments are counted: all share an event loop."""

    def __init__(self, workload: Workload) -> None:
        self.workload = workload
        self._moment = 0
        self._calls: dict[int, Call] = {}

    def begin(self, client: int, operation: Operation) -> int:
        self._moment += 1
        self._calls[self._moment] = Call(client, operation, self._moment)
        return self._moment

    def answer(self, number: int, reply: Reply) -> None:
        self._moment += 1
        self._calls[number] = replace(self._calls[number], ended=self._moment, reply=reply)
        self.workload.learn(self._calls[number].operation, reply)

    def forget(self, number: int) -> None:
        del self._calls[number]

    def history(self) -> list[Call]:
        return [c for c in self._calls.values() if c.reply is not None or not c.operation.is_read]


class Caller:
    """One client, which follows the database from server to server.

    A loyal one leaves a server only when it is gone, and still asks one that was taken over.
    """

    def __init__(self, board: Board, random: Random, *, repeats: bool, is_loyal: bool) -> None:
        self.counts: Counter[str] = Counter()
        self._board = board
        self._random = random
        self._repeats = repeats
        self._is_loyal = is_loyal
        self._keys = IdempotencyKeys(random_bytes=random.randbytes)
        self._connection: Connection | None = None
        self._version = 0
        self._answered: list[tuple[Operation, bytes, Reply]] = []

    async def call(self, operation: Operation) -> Reply:
        """Return the reply to an operation. Raises `NotApplied` or `OutcomeUnknown`; the latter for
        no change, if it repeats.
        """
        if not self._repeats:
            return await self._send(operation, None)
        if self._random.random() < ECHO_SHARE:
            await self.ask_again()
        key = self._keys.next()
        async with asyncio.timeout(scaled_timeout_s(60)):
            reply = await self._send_until_known(operation, key)
        branch = operation.then if reply.succeeded else operation.otherwise or ()
        if not reply.not_a_counter and any(not isinstance(each, Get) for each in branch):
            self._answered = [*self._answered, (operation, key, reply)][-ECHOES_KEPT:]
        return reply

    async def close(self) -> None:
        if self._connection is not None:
            await self._connection.close()
            self._connection = None

    async def _send_until_known(self, operation: Operation, key: bytes) -> Reply:
        unknown = False  # outcome of the attempts before
        while True:
            try:
                return await self._send(operation, key)
            except OutcomeUnknown:
                if operation.is_read:
                    raise
                unknown = True
            except NotApplied:  # of this attempt; earlier ones may have been applied
                if not unknown:
                    raise
            self.counts["repeated"] += 1

    async def _send(self, operation: Operation, key: bytes | None) -> Reply:
        """Send it once; when the server is gone, wait for the next one."""
        if self._version < self._board.version and not self._is_loyal:
            await self.close()
        if self._connection is None:
            self._version = self._board.version
            address, random = self._board.address, self._random
            self._connection = Connection(address, random, retries=self._repeats)
        try:
            return await self._connection.send(operation, key)
        except ShaleKVError as error:
            if isinstance(error, SERVER_GONE):
                await self._board.newer_than(self._version)
                await self.close()
            raise

    async def ask_again(self) -> None:
        """I15: the answer to a request that was answered before is the same."""
        if not self._answered:
            return
        operation, key, reply = self._random.choice(self._answered)
        try:
            again = await self._send(operation, key)
        except ShaleKVError:
            return  # there was no answer
        assert again == reply, f"{operation} was answered by {reply}, and then by {again}"
        self.counts["asked again"] += 1


class Campaign:
    """One database, its servers one after another, and all clients."""

    def __init__(self, random: Random) -> None:
        self.histories: list[list[Call]] = []
        self.counts: Counter[str] = Counter()
        self.refused: Counter[str] = Counter()
        self._random = random
        self._board = Board()
        self._is_over = False

    async def run(self, processes: Processes, folder: Path) -> None:
        url = f"file://{folder}"
        server = await processes.serve(url, *FOUR_IN_FLIGHT)
        await self._board.post(server.listen)
        async with asyncio.TaskGroup() as tasks:
            for lane in range(LANES):
                tasks.create_task(self._run_lane(lane))
            for number in range(DISRUPTIONS):
                await self._progress()
                before = server
                if number % 2 == 0:
                    await before.kill()
                server = await processes.serve(url, *FOUR_IN_FLIGHT)
                await self._board.post(server.listen)
                if number % 2:
                    assert await before.exited() == ExitCode.FENCED, before.report()
            await self._progress()
            self._is_over = True
        assert await server.stop() == ExitCode.OK, server.report()

    async def _progress(self) -> None:
        """Wait until a share of the budget has passed and clients were answered meanwhile."""
        due_s, answered = time.monotonic() + BUDGET_S / (DISRUPTIONS + 1), self.counts["answered"]
        await until(
            lambda: time.monotonic() >= due_s and self.counts["answered"] > answered, "answers"
        )

    async def _run_lane(self, lane: int) -> None:
        callers = [
            Caller(self._board, self._fork(), repeats=number % 2 == 0, is_loyal=number < 2)
            for number in range(CLIENTS)
        ]
        number = 0
        while not self._is_over:
            number += 1
            await self._run_round(callers, b"%d-%d/" % (lane, number))
        for caller in callers:
            await caller.ask_again()
            self.counts += caller.counts
            await caller.close()

    async def _run_round(self, callers: Sequence[Caller], prefix: bytes) -> None:
        """All clients at once; in the end each key is read."""
        random = self._fork()
        done = Round(Workload(random, prefix, tied=random.random() < TIED_SHARE))

        async def client(number: int) -> None:
            for _ in range(random.randint(*OPERATIONS)):
                await self._call(number, callers[number], done.workload.draw(), done)

        async with asyncio.TaskGroup() as tasks:
            for number in range(len(callers)):
                tasks.create_task(client(number))
        async with asyncio.timeout(scaled_timeout_s(60)):
            for operation in done.workload.last_reads():
                while not await self._call(2, callers[2], operation, done):
                    pass  # the server has changed
        self.histories.append(done.history())

    async def _call(self, number: int, caller: Caller, operation: Operation, done: Round) -> bool:
        call = done.begin(number, operation)
        try:
            reply = await caller.call(operation)
        except NotApplied as error:
            done.forget(call)
            self.refused[error.reason or error.code] += 1
        except OutcomeUnknown:
            self.counts["unknown"] += not operation.is_read
        else:
            done.answer(call, reply)
            self.counts["answered"] += 1
            return True
        return False

    def _fork(self) -> Random:
        return Random(self._random.getrandbits(64))


async def test_calls_are_linearizable(tmp_path: Path) -> None:
    """Every history has a legal order, whose writes of unknown outcome are done once or never."""
    campaign = Campaign(random_of("linearizability"))
    with Processes() as processes:
        await campaign.run(processes, tmp_path / "db")
    parts = [part for history in campaign.histories for part in partitions(history)]
    began_s = time.monotonic()
    verdicts = [judge(part) for part in parts]
    theirs = porcupine.judge_all(porcupine.build(), parts)
    sys.stdout.write(
        f"{len(campaign.histories)} rounds, {len(parts)} histories of keys, "
        f"{dict(campaign.counts)}, not applied {dict(campaign.refused)}, "
        f"Porcupine gave up {theirs.count(None)}, judged in {time.monotonic() - began_s:.1f} s\n"
    )
    for verdict, is_legal in zip(verdicts, theirs, strict=True):
        assert verdict.is_linearizable, str(verdict)
        assert is_legal is not False, f"Porcupine refuses what has this order: {verdict.order}"
    assert theirs.count(None) <= UNDECIDED_SHARE_MAX * len(parts)
    assert campaign.refused.keys() <= NOT_APPLIED
    assert min(campaign.counts[each] for each in ("repeated", "asked again", "unknown")) > 0
