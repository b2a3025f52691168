"""Writers that rival, clients that use them, and chaos: the shipped writer in the simulation."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from random import Random
from typing import Any, TypeAlias

from shalekv.format.names import WAL_FOLDER
from shalekv.settings import CLOCK_JUMP_MAX_S
from tests.sim.callers import Callers, check_i13_one_writer_serves, check_i13_writes_succeed
from tests.sim.cluster import Cluster
from tests.sim.faults import Faults
from tests.sim.history import Operation, Outcome
from tests.sim.options import Trouble
from tests.sim.simulation import Simulation, some_days_ms

# Times are those at pace 1, but for the first.
NEAR_MS = (0.05, 0.05, 1.0, 10.0)  # one way between a slow opener and the store
HELD_MS = (1.0, 1_000.0, 1_000.0, 1_000.0)  # until an object arrives: others may land before it
WARNING_MS = 200.0  # between what happens to an older writer and the opening of the newer one
STALE_MS = (100.0, 1_000.0, 5_000.0)  # from the opening until an older writer continues
LATE_MS = (0.0, 0.0, 20.0, 300.0)  # from the opening until what was sent before it arrives
QUIET_MS = 1_000.0  # until a writer that clients leave alone is waited for no longer
POLL_MS = 10.0  # between two polls
STALE_QUESTIONS = 3
LATE_WRITES = 6


async def overtake(cluster: Cluster, callers: Callers, name: str) -> None:
    """Have the writer `name` overtake others that open, and those that serve.

    Of the latter, some stop and continue later without having noticed; of the others, objects that
    are on their way arrive when the newer writer serves. Then each opening writer puts its fence
    into the slot of an object that is on its way, while objects that need not wait for that one may
    land behind it (k > 1).
    """
    sim, random = cluster.sim, cluster.sim.random_for(f"overtaking at {cluster.sim.now_ms}")
    serves = asyncio.Event()
    async with asyncio.TaskGroup() as tasks:
        for older in list(cluster.writers):
            befall = random.choice([_stop, _be_late, _be_late])
            tasks.create_task(befall(cluster, callers, older, serves))
        await sim.sleep_ms(WARNING_MS * cluster.pace)
        openers = [
            await cluster.start_slow_opener(cluster.draw(random), random.choice(NEAR_MS))
            for _ in range(random.choice([1, 2, 3]))
        ]
        await cluster.change_amid_takeover(random)
        await cluster.let_serve(name, cluster.draw(random))
        serves.set()
        for opener in openers:
            await sim.sleep_ms(random.choice([10.0, 300.0]))
            await _meet_fence(cluster, callers, name, opener, random)


async def _meet_fence(
    cluster: Cluster, callers: Callers, name: str, opener: str, random: Random
) -> None:
    """A slow opener takes the slot of an object that a writer has on its way."""
    if random.random() < 0.7:
        await _quieten(cluster, name)
    gate = cluster.hold_objects(name, times=1)
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(callers.contend(random, name, gate, random.choice([1, 2, 3])))
        await cluster.reached(gate)
        await _until_landed(cluster, random.choice(HELD_MS) * cluster.pace)
        cluster.release_opener(opener)
        await cluster.sim.sleep_ms(random.choice(NEAR_MS) * 8)
        gate.release()
        cluster.avoided.discard(name)


async def _stop(cluster: Cluster, callers: Callers, name: str, serves: asyncio.Event) -> None:
    """Stop a writer while it is idle, so that it does not notice the takeover; then call it."""
    sim = cluster.sim
    random = sim.random_for(f"stopping {name} at {sim.now_ms}")
    await _quieten(cluster, name)
    node = cluster.running.get(name)
    if node is None:
        return
    node.pause()
    await serves.wait()
    await sim.sleep_ms(random.choice(STALE_MS) * cluster.pace)
    async with asyncio.TaskGroup() as tasks:
        if cluster.running.get(name) is node:
            for _ in range(STALE_QUESTIONS):
                tasks.create_task(callers.ask_once(random, name))
            await sim.sleep_ms(1.0)
            cluster.avoided.discard(name)
        node.resume()


async def _be_late(cluster: Cluster, callers: Callers, name: str, serves: asyncio.Event) -> None:
    """All that a writer has sent, and may send, arrives when it was overtaken."""
    sim = cluster.sim
    random = sim.random_for(f"{name} is late from {sim.now_ms}")
    gate = cluster.hold_objects(name)
    async with asyncio.TaskGroup() as tasks:
        for _ in range(LATE_WRITES):
            tasks.create_task(callers.write_once(random, name))
            await sim.sleep_ms(WARNING_MS * cluster.pace / LATE_WRITES)
        await serves.wait()
        await sim.sleep_ms(random.choice(LATE_MS) * cluster.pace)
        gate.release()


async def _until_landed(cluster: Cluster, timeout_ms: float) -> None:
    """Wait until some WAL object is durable that is not now."""
    sim, log = cluster.sim, cluster.sim.store.log
    end_ms, before = sim.now_ms + timeout_ms, len(log)
    while sim.now_ms < end_ms:
        await sim.sleep_ms(POLL_MS * cluster.pace)
        if any(applied.name.startswith(WAL_FOLDER) for applied in log[before:]):
            return


async def _quieten(cluster: Cluster, name: str) -> None:
    """Wait until nothing is on its way to or from a writer, which clients leave alone for that."""
    cluster.avoided.add(name)
    end_ms = cluster.sim.now_ms + QUIET_MS * cluster.pace
    while cluster.sim.now_ms < end_ms:
        writer = cluster.writers.get(name)
        if writer is None or not writer.engine.log.groups_in_flight:
            return
        await cluster.sim.sleep_ms(POLL_MS * cluster.pace)


BETWEEN_MS = (300.0, 3_000.0, 10_000.0)  # at pace 1
# Logical time follows the clock of a writer's machine; checkers allow it a few seconds.
JUMPS_MS = (5.0, 200.0, 1_000.0)
JUMPED_MS_MAX = 3_000.0  # of one machine, in all
# A process trusts a snapshot for a second less than it lives, and a store may report whole seconds.
STORE_JUMPS_MS = (1, 20, 100)
STORE_JUMPED_MS_MAX = 400
TICKS_MS = (1, 1_000)  # a header has whole seconds


async def jump_clocks(cluster: Cluster) -> None:
    sim = cluster.sim
    random = sim.random_for("clocks")
    sim.store.tell_time_in(random.choice(TICKS_MS))
    jumped_ms: dict[str, float] = {}
    store_jumped_ms = 0
    while True:
        await sim.sleep_ms(random.choice(BETWEEN_MS) * cluster.pace)
        names = sorted({node.name for node in sim.nodes()})
        name, ahead_ms = random.choice(names), random.choice(JUMPS_MS)
        store_ahead_ms = random.choice(STORE_JUMPS_MS) if random.random() < 0.2 else 0
        if not sim.options.has(Trouble.CLOCKS):
            continue
        jumped_ms[name] = jumped_ms.get(name, 0.0) + ahead_ms
        if jumped_ms[name] <= JUMPED_MS_MAX:
            sim.clock_of(name).jump_ms(ahead_ms)
            sim.note(f"the clock of {name} jumps by {ahead_ms:g} ms")
        store_jumped_ms += store_ahead_ms
        if store_ahead_ms and store_jumped_ms <= STORE_JUMPED_MS_MAX:
            sim.store.jump_clock_ms(store_ahead_ms)
            sim.note(f"the clock of the store jumps by {store_ahead_ms} ms")


async def mislead_writers(cluster: Cluster) -> None:
    """Report to a serving writer, now and then, a store time that is days ahead.

    The error differs from that of its machine's clock: two clocks that agree are believed.
    """
    sim, random = cluster.sim, cluster.sim.random_for("wrong times for writers")
    while True:
        await sim.sleep_ms(random.choice(BETWEEN_MS) * cluster.pace)
        off_ms, writers = abs(some_days_ms(random)), sorted(cluster.writers)
        if not writers or not sim.options.has(Trouble.CLOCKS):
            continue
        name = random.choice(writers)
        if abs(off_ms - sim.clock_of(name).wall_ahead_ms) <= 2 * CLOCK_JUMP_MAX_S * 1_000:
            continue
        sim.store.mislead(name, off_ms)
        sim.note(f"{name} gets a time that is {off_ms} ms ahead")
        try:
            await sim.sleep_ms(random.choice(BETWEEN_MS) * cluster.pace)
        finally:
            sim.store.mislead(name, 0)


WRITER_NAMES = ("w1", "w2", "w3")
CALM_MS = 2_000.0  # during which clients continue after the faults have stopped
PEACE_MS = 90_000.0  # the longest timeout of a request, and time to open and to notice
LENGTHS = (0.5, 1.0, 1.5)  # of chaos: short runs are cheap, long ones reach other states
LENGTHS_BESIDE = (0.5, 1.0, 3.0)  # where there is more than writers
TAKEOVERS_MAX = 3  # in peace, by what was sent before
AGAIN_MS = 10_000.0  # by then a writer that was overtaken has ended
PEACE_POLL_MS = 500.0  # between two polls whether it is peaceful
BUSY_MS = 30_000.0  # for which others continue when no writer is left, at pace 1
FALLS_MAX = 5  # in a row, of a writer that is started again whenever it has crashed
FALLS_MS = (1.0, 30.0, 300.0, 1_000.0)  # from a start to the next crash, at pace 1, at most

_WHAT_IT_TAKES = {
    "overtake": Trouble.TAKEOVERS,
    "crash": Trouble.CRASHES,
    "pause": Trouble.PAUSES,
}

Beside: TypeAlias = Sequence[Callable[[Cluster], Coroutine[Any, Any, None]]]
NOTHING_BESIDE: Beside = ()


async def chaos(cluster: Cluster, callers: Callers) -> None:
    """Start, crash, pause, resume and overtake writers at random moments."""
    sim, random = cluster.sim, cluster.sim.random_for("chaos")
    overtaking: asyncio.Task[None] | None = None
    async with asyncio.TaskGroup() as tasks:
        length = random.choice(LENGTHS_BESIDE if cluster.beside else LENGTHS)
        for _ in range(int(sim.options.chaos_steps * length)):
            step_ms = random.choice([1.0, 30.0, 300.0, 3_000.0]) * random.random()
            await sim.sleep_ms(step_ms * cluster.pace)
            name = random.choice(WRITER_NAMES)
            is_running = name in cluster.running
            # An opening ends another one in progress, and no writer would serve for long.
            is_calm = overtaking is None or overtaking.done()
            events = ["start", "overtake", "crash", "pause", "resume", "nothing"]
            event = random.choices(events, [3, 6, 3, 2, 2, 0] if is_calm else [1, 0, 2, 2, 2, 7])[0]
            if event in _WHAT_IT_TAKES and not sim.options.has(_WHAT_IT_TAKES[event]):
                continue
            if cluster.is_undisturbed and event != "resume":
                continue
            if event == "start" and not is_running:
                cluster.start_writer(name, cluster.draw(random))
            elif event == "overtake" and not is_running:
                overtaking = tasks.create_task(overtake(cluster, callers, name))
            elif event == "crash" and is_running:
                cluster.crash(name)
                tasks.create_task(_start_again(cluster, name, Random(random.getrandbits(64))))
            elif event == "pause" and is_running:
                cluster.running[name].pause(random.choice([10.0, 1_000.0, 60_000.0, 1_200_000.0]))
            elif event == "resume" and is_running:
                cluster.running[name].resume()


async def _start_again(cluster: Cluster, name: str, random: Random) -> None:
    """A writer is started when it has crashed, and crashes soon: while it opens, as a rule."""
    for _ in range(FALLS_MAX):
        if random.random() < 0.2 or name in cluster.running or cluster.is_undisturbed:
            return
        cluster.start_writer(name, cluster.draw(random))
        node = cluster.running[name]
        await cluster.sim.sleep_ms(random.choice(FALLS_MS) * random.random() * cluster.pace)
        if random.random() < 0.2 or cluster.running.get(name) is not node:
            return
        cluster.crash(name)


async def rival_writers(
    sim: Simulation, cluster: Cluster | None = None, beside: Beside = NOTHING_BESIDE
) -> Cluster:
    """Run chaos under load, then peace, then a last opening where all is repeated and read.

    The writer that serves in peace was opened while requests of earlier writers may still have been
    on their way; the last one when none is. `beside` runs concurrently until then.
    """
    cluster = cluster or Cluster(sim)
    await cluster.found()
    faults = Faults.swarm(sim.rng)
    if sim.options.has(Trouble.STORE):
        sim.store.faults = faults
    callers = Callers(cluster)
    async with asyncio.TaskGroup() as tasks:
        clients = [
            tasks.create_task(callers.client(number)) for number in range(sim.options.clients)
        ]
        clients += [
            tasks.create_task(each(cluster)) for each in (*beside, jump_clocks, mislead_writers)
        ]
        await chaos(cluster, callers)
        sim.store.faults = Faults.none()
        await sim.sleep_ms(CALM_MS)
        for client in clients:
            client.cancel()
    await end_in_peace(cluster, callers)
    await reopen(cluster, callers)
    return cluster


async def end_in_peace(cluster: Cluster, callers: Callers) -> None:
    """Without faults, one writer soon serves and the others have ended (I13).

    A writer that was slow to open may take over from one that came later; it then is the one. So
    may one that has crashed: its claim was on its way still.
    """
    for name in list(cluster.slow_openers):
        cluster.release_opener(name)
    for node in cluster.running.values():
        node.resume()
    put = await _put_in_peace(cluster, callers)
    for _ in range(TAKEOVERS_MAX):
        if put.attempts[-1].outcome is Outcome.ACKNOWLEDGED:
            break
        await cluster.sim.sleep_ms(AGAIN_MS)
        put = await _put_in_peace(cluster, callers)
    check_i13_writes_succeed(put)


async def _put_in_peace(cluster: Cluster, callers: Callers) -> Operation:
    """See one writer serve, started if there is none, and put something."""
    for _ in range(2):
        if not cluster.running:
            cluster.start_writer("last", cluster.draw(cluster.sim.rng))
        await _until_peace(cluster)
    check_i13_one_writer_serves(cluster.writers, cluster.running, cluster.history.endings)
    return await callers.try_to_put(next(iter(cluster.writers)))


async def _until_peace(cluster: Cluster) -> None:
    end_ms = cluster.sim.now_ms + PEACE_MS
    while cluster.sim.now_ms < end_ms and not _is_peaceful(cluster):
        await cluster.sim.sleep_ms(PEACE_POLL_MS)


def _is_peaceful(cluster: Cluster) -> bool:
    """One writer serves, no other runs that could take over from it, and all it sent has ended."""
    if len(cluster.writers) != 1 or list(cluster.running) != list(cluster.writers):
        return False
    return not any(each.engine.log.groups_in_flight for each in cluster.writers.values())


async def reopen(cluster: Cluster, callers: Callers) -> None:
    """Open once more and read everything; then repeat all that has an idempotency key (I15)."""
    for name in list(cluster.running):
        cluster.crash(name)
    late_ms = max(0.0, cluster.sim.store.last_arrival_ms - cluster.sim.now_ms)
    busy_ms = min(late_ms, BUSY_MS * cluster.pace)
    await cluster.sim.sleep_ms(busy_ms)
    for end in cluster.beside:
        end()
    await cluster.sim.sleep_ms(late_ms - busy_ms)
    cluster.start_writer("recovered", cluster.draw(cluster.sim.rng))
    async with asyncio.timeout(PEACE_MS / 1000):
        await cluster.serving.wait()
    await callers.read_all("recovered")
    await callers.repeat_all("recovered")
    await callers.read_all("recovered")
