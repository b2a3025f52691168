"""Schedules: what happens to the processes of one database, step by step, and the final checks.

    serve old
    load old 100
    pause old
    serve new
    resume old
    fenced old
    check new

Each line is a step: the name of a method of `ScheduleRun` without its `do_`, then its arguments.
Processes have names. All clients share one history, which `check` compares with the database.
"""

from __future__ import annotations

import asyncio
import shlex
import signal
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from random import Random
from typing import Any

import grpc

from shalekv.cli.console.exit_codes import ExitCode
from shalekv.v1 import kv_pb2
from shalekv_client import Client
from tests.kit.constants import variables
from tests.kit.processes.bucket_troubles import TroubledBucket
from tests.kit.processes.child import Child, ChildFailed, epoch_of, event, fenced_end, is_epoch_won
from tests.kit.processes.cluster import ALONE, COMPACT_ALL, Cluster
from tests.kit.processes.history import Attempt, Fate, History
from tests.kit.processes.load import (
    ONE_ATTEMPT,
    TIMEOUT_MS,
    Load,
    attempt_write,
    check_whole_wal,
    read_state,
    write_some,
)
from tests.kit.processes.processes import SERVE, Processes
from tests.kit.processes.stalling import stalled, start_stalling
from tests.kit.processes.stubs import kv_stub
from tests.kit.processes.wal_contents import manifest_ids, manifest_path, wal_ids, wal_path
from tests.kit.timeouts import until
from tests.servers.proxy import ACCESS_DENIED, INTERNAL_ERROR, SLOW_DOWN

DEADLINE_S = 250
WAL_PUT, MANIFEST_PUT = "^PUT /[^?]*/wal/", "^PUT /[^?]*/manifest/"
IMPATIENT_MS = 1_500  # a deadline that passes while the store is in trouble
IMPATIENT_COUNT = 20  # writes with such a deadline, if the client notices it first
SHORT_S = 4.0  # an outage that is not reported yet
NEVER_SEQ = 2**60  # no commit has this number
QUICK = variables({"shalekv.store.retry:RETRY_MAX_MS": 200})
# Where there is a bucket, compactions, collections and repeated requests come within moments.
IN_BUCKET = (
    *("--compactor-idle-poll-ms", "100", "--sst-bytes", "65536"),
    *("--wal-trigger-age-ms", "200", "--collect-interval-ms", "200", "--collect-age-s", "1"),
    *("--wal-retention-s", "0", "--fence-poll-ms", "200"),
    *("--snapshot-ttl-s", "20"),  # a server that is paused for seconds is no fault here
)


@asynccontextmanager
async def call_in_progress(address: str) -> AsyncIterator[None]:
    """A call that is not answered while entered: a server that is asked to stop waits for it."""
    async with kv_stub(address) as stub:
        header = kv_pb2.RequestHeader(min_seq=NEVER_SEQ)
        call = stub.Get(kv_pb2.GetRequest(header=header, key=b"k"), timeout=DEADLINE_S)
        await stub.Get(kv_pb2.GetRequest(key=b"k"))  # comes behind it, on the same connection
        try:
            yield
        finally:
            call.cancel()
            with suppress(asyncio.CancelledError, grpc.aio.AioRpcError):
                await call


class ScheduleRun:
    """One schedule on a database in a folder, or in a bucket behind a proxy."""

    def __init__(
        self, processes: Processes, folder: Path, bucket: TroubledBucket | None = None
    ) -> None:
        self.history = History(seed=1)
        place: dict[str, Any] = (
            {} if bucket is None else {"bucket": bucket.url, "env": bucket.env | QUICK}
        )
        self.database = Cluster(processes, folder, **place)
        self._bucket = bucket
        self._random = Random(1)
        self._children: dict[str, Child] = {}
        self._loads: dict[str, Load] = {}
        self._clients: dict[str, Client] = {}
        self._late: list[tuple[Attempt, asyncio.Task[str]]] = []
        self._slot = 0
        self._outage_began_s = 0.0
        self._objects: set[str] = set()
        self._is_collected = bucket is not None
        self._stack = AsyncExitStack()
        self._tasks = asyncio.TaskGroup()

    async def play(self, steps: str) -> None:
        """Take all steps; fails where one cannot be taken."""
        async with asyncio.timeout(DEADLINE_S), self._stack, self._tasks:
            for step in filter(str.strip, steps.splitlines()):
                verb, *words = shlex.split(step)
                try:
                    await getattr(self, f"do_{verb}")(*words)
                except AssertionError as error:
                    error.add_note(f"in the step {step.strip()!r}")
                    raise

    # Processes.

    async def do_serve(self, name: str, *flags: str) -> None:
        await self.do_start(name, *flags)
        await self._children[name].ready()

    async def do_start(self, name: str, *flags: str) -> None:
        first = ALONE if self._bucket is None else IN_BUCKET
        self._children[name] = self.database.start_serve(*first, *flags)

    async def do_stalling(self, name: str, pin: str, command: str, *flags: str) -> None:
        """A command that will stop itself at a request."""
        known = {"serve": (*SERVE, *ALONE), "compactor": ("compactor", "--once", *COMPACT_ALL)}
        argv = (*known.get(command, (command,)), *flags, "--url", self.database.url)
        self._children[name] = start_stalling(self.database.processes, pin, *argv)

    async def do_ready(self, name: str) -> None:
        await self._children[name].ready()

    async def do_stalled(self, name: str) -> None:
        await stalled(self._children[name])

    async def do_pause(self, name: str) -> None:
        self._children[name].pause()

    async def do_resume(self, name: str) -> None:
        self._children[name].resume()

    async def do_kill(self, name: str) -> None:
        await self._children[name].kill()
        if name in self._loads:
            await self._loads.pop(name).ended.wait()

    async def do_stop(self, name: str) -> None:
        """SIGTERM: it ends with 0; what was sent before is answered, and later calls refused."""
        child, load, sent = self._children[name], self._loads.pop(name, None), self.history.attempts
        if load is not None:
            async with call_in_progress(child.listen):  # so that its end waits for the refusals
                count = len(sent)
                child.send(signal.SIGTERM)
                await load.ended.wait()
            assert load.reasons()["STOPPING"], load.ended_by
            assert not [each for each in sent[:count] if each.fate is Fate.UNKNOWN]
            assert await child.exited() == ExitCode.OK, child.report()
        else:
            assert await child.stop() == ExitCode.OK, child.report()
        assert child.lines()[-1]["event"] == "stopped", child.report()

    async def do_ends(self, name: str, code: str) -> None:
        child = self._children[name]
        assert await child.exited() == ExitCode[code], child.report()

    async def do_fails(self, name: str, code: str) -> None:
        """Stop it: it ends with this exit code and a message, without a traceback."""
        child = self._children[name]
        assert await child.stop() == ExitCode[code], child.report()
        assert child.lines()[-1]["event"] == "ended by an error", child.report()
        assert "Traceback" not in child.stderr()
        await self._loads.pop(name).ended.wait()

    async def do_fenced(self, name: str) -> None:
        await fenced_end(self._children[name])
        if name in self._loads:
            await self._loads.pop(name).ended.wait()

    async def do_never_served(self, name: str) -> None:
        child = self._children[name]
        assert not any("listen" in line for line in child.lines()), child.report()

    async def do_says(self, name: str, *words: str) -> None:
        text = " ".join(words)
        await self._children[name].line(lambda line: text in str(line))

    async def do_logs(self, name: str, *words: str) -> None:
        await self._children[name].line(event(" ".join(words)))

    async def do_survive(self, name: str, *names: str) -> None:
        """Keep the one of these processes with the highest epoch, from now on as `name`, under
        load.
        """
        for each in names:
            await self._children[each].line(is_epoch_won)
            with suppress(ChildFailed):
                await self._children[each].ready()
                if each not in self._loads:
                    await self._begin_load(each)
        *ended, survivor = sorted(names, key=lambda each: epoch_of(self._children[each]))
        for each in ended:
            await self.do_fenced(each)
        self._children[name] = self._children.pop(survivor)
        self._loads[name] = self._loads.pop(survivor)

    # Writes.

    async def do_load(self, name: str, count: str) -> None:
        """Let clients write to it continuously; wait until `count` writes are acknowledged."""
        if name not in self._loads:
            await self._begin_load(name)
        load = self._loads[name]
        assert await load.acknowledged(int(count)), (load.ended_by, self._children[name].report())

    async def do_rest(self, name: str) -> None:
        """Its clients come to their end, without an error."""
        load = self._loads.pop(name)
        load.stop()
        await load.ended.wait()
        assert load.ended_by == [], self._children[name].report()

    async def do_write(self, name: str) -> None:
        """Some writes, one after the other, which are acknowledged."""
        await write_some(self.history, await self._client(name))

    async def do_late(self, name: str, count: str) -> None:
        client = await self._client(name)
        for _ in range(int(count)):
            attempt = self.history.begin([b"shared"])
            task = self._tasks.create_task(attempt_write(self.history, client, attempt))
            self._late.append((attempt, task))

    async def do_refused(self) -> None:
        found = await asyncio.gather(*(task for _, task in self._late))
        assert all(found), [str(attempt) for attempt, _ in self._late]

    async def do_lost(self, name: str) -> None:
        """Check that it reports accepted writes that were lost; none of them was acknowledged."""
        lost = [line for line in self._children[name].lines() if line.get("event") == "write lost"]
        assert lost, self._children[name].report()
        assert {line["reason"] for line in lost} == {"FENCED"}
        acknowledged = {attempt.seq for attempt in self.history.of_fate(Fate.ACKNOWLEDGED)}
        assert acknowledged.isdisjoint(line["seq"] for line in lost)

    async def do_check(self, name: str) -> None:
        """Check the clients' history against this server, before and after a crash, and files."""
        if name in self._loads:
            await self.do_rest(name)
        child = self._children[name]
        state = await read_state(child.listen)
        if self._is_collected:
            self.history.check_state(state)
        else:
            check_whole_wal(self.database.folder, self.history, state)
        await child.kill()
        if self._bucket is not None:
            await self.database.run("fsck", "--deep")
        else:
            await self.database.check()
        await self.do_serve("again", *(ALONE if self._bucket else ()))
        again = self._children["again"]
        self.history.check_state(await read_state(again.listen))
        assert await again.stop() == ExitCode.OK, again.report()

    # Events that concern the objects of a database in a folder.

    async def do_compact(self) -> None:
        await self.database.compact()

    async def do_collect(self) -> None:
        self._is_collected = True
        await self.database.collect()

    async def do_run(self, *argv: str) -> None:
        await self.database.run(*argv)

    async def do_drop_snapshots(self) -> None:
        await self.database.drop_snapshots()

    async def do_slot(self) -> None:
        """The next slot of the log is the one that is spoken of from now on."""
        self._slot = wal_ids(self.database.folder)[-1] + 1

    async def do_gone(self, after: str) -> None:
        """Collect until the object `count` slots after that slot is gone."""
        path = wal_path(self.database.folder, self._slot + int(after))
        await self._collect_while(path.exists)

    async def do_outputs(self) -> None:
        found = self.database.objects("levels/")
        assert found
        assert not found & self._objects
        self._objects = found

    async def do_gone_outputs(self) -> None:
        await self._collect_while(lambda: bool(self.database.objects("levels/")))

    async def do_gone_snapshot(self) -> None:
        """Collect until the snapshot that there is has expired, and its manifest is gone."""
        (snapshot,) = self.database.manifest().snapshots
        path = manifest_path(self.database.folder, snapshot.manifest_id)
        await self._collect_while(path.exists)
        await self.do_no_snapshots()

    async def do_no_snapshots(self) -> None:
        assert not self.database.manifest().snapshots

    async def do_recycle(self) -> None:
        """Make the next manifests, and collect the first of them: its id is free again.

        A process that was about to create it finds its name free, and later ids taken.
        """
        folder = self.database.folder
        self._slot = manifest_ids(folder)[-1] + 1
        await self.do_run("snapshot", "create", "--name", "passing", "--ttl", "1h")
        await self.do_run("snapshot", "delete", "passing")
        await self.do_collect()
        assert not manifest_path(folder, self._slot).exists()
        assert manifest_ids(folder)[-1] > self._slot

    async def do_made_again(self, name: str) -> None:
        """Check that the edit of the manifest with that id is in the current one as well."""
        recycled, current = self.database.manifest(self._slot), self.database.manifest()
        match name:
            case "snapshot":
                assert [each.name for each in recycled.snapshots] == ["kept"]
                assert [each.name for each in current.snapshots] == ["kept"]
            case "epoch":
                assert recycled.writer_epoch == current.writer_epoch == 2
                assert recycled.writer_nonce == current.writer_nonce
            case _:
                assert recycled.leveled_ssts
                assert current.leveled_ssts

    # Events that concern the store of a database in a bucket.

    async def do_lose_replies(self, count: str) -> None:
        """Replies to creates of WAL objects and of manifests get lost."""
        self._proxy.lose_reply(WAL_PUT, times=int(count))
        self._proxy.lose_reply(MANIFEST_PUT, times=2)

    async def do_throttle(self) -> None:
        """A burst of 503 SlowDown, and one of 500."""
        self._proxy.answer(SLOW_DOWN, times=6)
        self._proxy.answer(INTERNAL_ERROR, when="^PUT ", times=3)

    async def do_all_met(self) -> None:
        """All that was to happen to requests has happened."""
        rules = [rule for rule in self._proxy.rules if rule.when.pattern != MANIFEST_PUT]
        await until(lambda: all(rule.spent == rule.times for rule in rules), "the faults")

    async def do_deny(self) -> None:
        self._outage_began_s = time.monotonic()
        self._proxy.answer(ACCESS_DENIED)

    async def do_heal(self) -> None:
        self._proxy.heal()

    async def do_vanish(self) -> None:
        self._outage_began_s = time.monotonic()
        await self._in_bucket.vanish()

    async def do_appear(self) -> None:
        await self._in_bucket.appear()

    async def do_times_out(self, name: str) -> None:
        """The outcome of a write is unknown at its deadline; an outage so short is no news.

        The server says so 100 ms before the deadline. On a busy machine that may come too late for
        the client; then it asks again, and by then the outage may be long enough to be reported.
        """
        child, outcome = self._children[name], ""
        for _ in range(IMPATIENT_COUNT):
            attempt = self.history.begin([b"short of time"])
            async with Client(child.listen, timeout_ms=IMPATIENT_MS, retry=ONE_ATTEMPT) as client:
                outcome = await attempt_write(self.history, client, attempt)
            if outcome != "unknown: DEADLINE_EXCEEDED":
                break
        assert outcome == "unknown: WRITE_TIMED_OUT", outcome
        health = await self.database.processes.run("health", "--addr", child.listen)
        is_short = time.monotonic() - self._outage_began_s < SHORT_S
        assert await health.exited() == ExitCode.OK or not is_short, child.report()

    async def do_upkeep(self, name: str) -> None:
        await self._children[name].line(event("compacted"))
        await self._children[name].line(lambda line: line.get("deleted_objects", 0) > 0)

    @property
    def _in_bucket(self) -> TroubledBucket:
        assert self._bucket is not None
        return self._bucket

    @property
    def _proxy(self) -> Any:
        return self._in_bucket.proxy

    async def _client(self, name: str) -> Client:
        if name not in self._clients:
            client = Client(self._children[name].listen, timeout_ms=TIMEOUT_MS, retry=ONE_ATTEMPT)
            self._clients[name] = await self._stack.enter_async_context(client)
            await client.status()  # connects
        return self._clients[name]

    async def _begin_load(self, name: str) -> None:
        load = Load(self.history, self._children[name].listen, self._random, clients=6)
        self._loads[name] = load
        self._tasks.create_task(load.run(), name=f"load on {name}")

    async def _collect_while(self, is_there: Callable[[], bool]) -> None:
        self._is_collected = True
        await self.database.collect(is_there)
