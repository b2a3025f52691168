"""I12: a read of a damaged object reports that, or returns the same as before.

A moment of the run is drawn, and the objects in the store at that time are copied. In the copy one
object at a time is damaged, and the shipped reader opened on it.
"""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import aclosing
from random import Random
from typing import TypeAlias

from shalekv.errors import CorruptObject, ShaleError
from shalekv.format import names
from shalekv.format.manifest import decode_manifest
from shalekv.runtime import Runtime
from shalekv.server.reader import Reader
from shalekv.server.service import Call
from shalekv.settings import (
    CacheSettings,
    ReaderConfig,
    ReaderSettings,
    SnapshotChoice,
    UrlSettings,
)
from shalekv.store.memory import MemoryObjects, MemoryStore
from shalekv.v1 import kv_pb2
from tests.kit.serving.answers import answered, scan_of
from tests.sim.errors import Violation
from tests.sim.invariants.catalogue import checks
from tests.sim.requests import KEYS
from tests.sim.simulation import Simulation

DAMAGES = 3  # of one run
VALUES_TRIED = 4  # the last ones: most of those before were overwritten since
_VALUE = re.compile(rb"v\d+")  # as clients write them
TIMEOUT_S = 600.0  # of virtual time, for an answer of any kind
EXAMINER = "examiner"

Objects: TypeAlias = Mapping[str, bytes]
Answers: TypeAlias = tuple[object, ...]


def objects_at(sim: Simulation, count: int) -> dict[str, bytes]:
    there: dict[str, bytes] = {}
    for each in sim.store.log[:count]:
        if each.operation == "create":
            there[each.name] = each.data
        else:
            there.pop(each.name, None)
    return there


@checks(12, "writers", "database")
async def check_i12_damage_is_detected(
    sim: Simulation, *, damages: int = DAMAGES, random: Random | None = None
) -> Counter[str]:
    """Whatever object is flipped, cut, swapped or replaced by an older one: no other answer.

    Keys are got, and everything is scanned in both directions. What became of it is counted.
    """
    random = random or sim.random_for("damage")
    log = sim.store.log
    there = objects_at(sim, random.randrange(len(log) // 2, len(log)) + 1)
    outcomes: Counter[str] = Counter()
    try:
        expected = await _examine(sim, there)
    except ShaleError as error:  # between two steps of a process it may be no database yet
        outcomes[f"not damaged: {type(error).__name__}"] += 1
        return outcomes
    for _ in range(damages):
        damage = random.choice([flip, flip_value, cut, swap, put_back])
        damaged, what = damage(random, there)
        try:
            answers = await _examine(sim, damaged)
        except CorruptObject as error:
            outcomes[f"{damage.__name__}: {type(error).__name__}"] += 1
        except (ShaleError, TimeoutError) as error:
            raise Violation(f"I12: {what}, and a reader says {error!r}") from error
        else:
            if answers != expected:
                raise Violation(f"I12: {what}, and {answers} is read instead of {expected}")
            outcomes[f"{damage.__name__}: harmless"] += 1
    return outcomes


def flip(random: Random, there: Objects) -> tuple[Objects, str]:
    name = _any(random, there)
    data = bytearray(there[name])
    bit = random.randrange(8 * len(data))
    data[bit // 8] ^= 1 << bit % 8
    return {**there, name: bytes(data)}, f"bit {bit} of {name} is flipped"


def flip_value(random: Random, there: Objects) -> tuple[Objects, str]:
    """One bit of a value is another, in one of the last objects of the log that hold any."""
    found = [
        (name, at.start())
        for name in sorted(there)
        if name.startswith(names.WAL_FOLDER)
        for at in _VALUE.finditer(there[name])
    ][-VALUES_TRIED:]
    if not found:
        return flip(random, there)
    name, offset = random.choice(found)
    data = bytearray(there[name])
    data[offset] ^= 1 << random.randrange(8)
    return {**there, name: bytes(data)}, f"a value in {name} is flipped"


def cut(random: Random, there: Objects) -> tuple[Objects, str]:
    name = _any(random, there)
    length = random.randrange(len(there[name]))
    return {**there, name: there[name][:length]}, f"{name} is cut after {length} bytes"


def swap(random: Random, there: Objects) -> tuple[Objects, str]:
    """Two objects of one kind are in each other's place."""
    name = _any(random, there)
    other = random.choice([each for each in there if _kind(each) == _kind(name)])
    swapped = {**there, name: there[other], other: there[name]}
    return swapped, f"{name} and {other} are swapped"


def put_back(random: Random, there: Objects) -> tuple[Objects, str]:
    """Replace one object by another one that was written before it."""
    name = _any(random, there)
    older = random.choice([each for each in there if _kind(each) == _kind(name) and each <= name])
    return {**there, name: there[older]}, f"{older} stands in the place of {name}"


Damage: TypeAlias = Callable[[Random, Objects], tuple[Objects, str]]


def _any(random: Random, there: Objects) -> str:
    """An object, of any kind alike; mostly one that is read."""
    found = _in_use(there) if random.random() < 0.9 else list(there)
    kind = random.choice(sorted({_kind(name) for name in found}))
    return random.choice(sorted(name for name in found if _kind(name) == kind))


def _in_use(there: Objects) -> list[str]:
    """The current manifest, the levels that it names, and the log behind them."""
    current = max(name for name in there if names.parse_manifest_name(name) is not None)
    manifest = decode_manifest(current, there[current])
    first = manifest.first_uncompacted_wal_id
    slots = [n for n in there if (slot := names.parse_wal_name(n)) is not None and slot >= first]
    return [current, *slots, *(names.level_name(info.id) for info in manifest.leveled_ssts)]


def _kind(name: str) -> str:
    return name.partition("/")[0]


async def _examine(sim: Simulation, objects: Objects) -> Answers:
    """All that a new reader answers of these objects."""
    node = sim.node(EXAMINER)
    try:
        async with asyncio.timeout(TIMEOUT_S):
            store = await copy_of(objects, sim.store.clock_ms)
            return await node.run(_read_all(store, sim.runtime_for(node)))
    finally:
        node.mark_ended()


async def copy_of(objects: Objects, clock_ms: Callable[[], int]) -> MemoryStore:
    store = MemoryStore(clock_ms, name="copy", objects=MemoryObjects())
    for name, data in objects.items():
        await store.create(name, data)
    return store


async def _read_all(store: MemoryStore, runtime: Runtime) -> Answers:
    cache = CacheSettings().model_copy(update={"block_cache_bytes": 0, "metadata_cache_bytes": 0})
    settings = ReaderConfig(
        database=UrlSettings(url="memory://sim"),
        reader=ReaderSettings(snapshot=SnapshotChoice.NONE),
        cache=cache,
    )
    reader = await Reader.open(store, settings=settings, runtime=runtime)
    found = reader.kv.batch_get(kv_pb2.BatchGetRequest(keys=KEYS), Call())
    reply = await answered(kv_pb2.BatchGetReply, found)
    answers: list[object] = [reply.header.seq]
    answers += [(e.found, e.value, e.seq, e.expire_at_ms) for e in reply.results]
    for is_reverse in (False, True):
        scan = scan_of(reader.kv, kv_pb2.ScanRequest(reverse=is_reverse), Call())
        async with aclosing(scan) as replies:
            async for part in replies:
                answers.append(part.header.seq)
                answers += [(e.key, e.value, e.seq, e.expire_at_ms) for e in part.entries]
    return tuple(answers)
