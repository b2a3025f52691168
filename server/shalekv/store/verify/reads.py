"""Whether what was written is read, whole and in ranges, and what was deleted is not."""

from __future__ import annotations

from shalekv.errors import ObjectNotFound
from shalekv.format.names import LEVELS_FOLDER
from shalekv.store.api import Exists
from shalekv.store.verify.races import read
from shalekv.store.verify.scratch import NotKept, Scratch
from shalekv.store.verify.verdict import Passed, Told

REPEATS = 20  # objects that are written and at once read by another view
RANGED_BYTES = 1_000
EDGE_BYTES = 1 << 20  # of a large object, read at its ends and in its middle

# offset, length and what they mean in an object of RANGED_BYTES
_RANGES = (
    (0, 1, 0, 1),
    (0, RANGED_BYTES, 0, RANGED_BYTES),
    (0, RANGED_BYTES + 1, 0, RANGED_BYTES),
    (1, RANGED_BYTES, 1, RANGED_BYTES),
    (499, 2, 499, 501),
    (RANGED_BYTES - 1, 1, RANGED_BYTES - 1, RANGED_BYTES),
    (RANGED_BYTES - 1, 100, RANGED_BYTES - 1, RANGED_BYTES),
    (RANGED_BYTES, 1, RANGED_BYTES, RANGED_BYTES),
    (RANGED_BYTES + 7, 10, RANGED_BYTES, RANGED_BYTES),
    (-1, 1, RANGED_BYTES - 1, RANGED_BYTES),
    (-10, 3, RANGED_BYTES - 10, RANGED_BYTES - 7),
    (-10, 100, RANGED_BYTES - 10, RANGED_BYTES),
    (-RANGED_BYTES, 5, 0, 5),
    (-RANGED_BYTES - 1, 5, 0, 5),
    (5, 0, 5, 5),
)


async def read_after_write(ground: Scratch) -> Passed:
    """An object is there for everybody once its create has ended."""
    for number in range(REPEATS):
        data = f"written {number}".encode() * (number + 1)
        name = await ground.created(f"write-{number:03d}", data, at=number)
        if await read(ground, name, at=number + 1) != data:
            raise NotKept("get", name, "other bytes are read than were written")
        await _sized(ground, name, len(data), at=number + 2)
    return Passed(f"{REPEATS} objects")


async def read_after_delete(ground: Scratch) -> Passed:
    """An object is gone for everybody once its delete has ended; and deleting nothing is fine."""
    for number in range(REPEATS):
        name = await ground.created(f"delete-{number:03d}", b"deleted", at=number)
        await ground.reader(number).delete([name])
        await gone(ground, name, at=number + 1)
    await ground.reader(0).delete([ground.name("never-made")])
    return Passed(f"{REPEATS} objects")


async def gone(ground: Scratch, name: str, *, at: int) -> None:
    """Nobody reads `name`, which was deleted."""
    try:
        await ground.reader(at).get(name)
    except ObjectNotFound:
        return
    raise NotKept("get", name, "an object that was deleted is still read")


async def ranges(ground: Scratch) -> Passed:
    """Ranges are exact: at both ends, past the end, and counted from the end."""
    data = ground.runtime.random.randbytes(RANGED_BYTES)
    name = await ground.created("ranges", data)
    for offset, length, first, end in _RANGES:
        found = await _range(ground, name, offset, length)
        if found != data[first:end]:
            asked = f"{length:,} from byte {offset:,} on, of {RANGED_BYTES:,}"
            came = f"{len(found):,} came, which are not the right {end - first:,}"
            raise NotKept("get_range", name, f"asked for {asked}: {came}")
    return Passed(f"{len(_RANGES)} ranges")


async def empty_object(ground: Scratch) -> Passed:
    """An object without bytes is one: it is there, listed, and read in any range."""
    name = await ground.created("empty", b"")
    await _sized(ground, name, 0, at=1)
    found = [await read(ground, name, at=1)]
    found += [await _range(ground, name, offset, 10) for offset in (0, 5, -5)]
    if any(found):
        raise NotKept("get", name, "an empty object has bytes")
    if [info.name for info in await ground.listed("empty", at=1)] != [name]:
        raise NotKept("list", name, "an empty object is not shown")
    return Passed()


async def large_object(ground: Scratch) -> Passed:
    """An object as large as SSTs are comes back whole, and is not replaced either."""
    size_bytes = ground.effort.large_object_bytes
    data = await ground.runtime.workers.run(ground.runtime.random.randbytes, size_bytes)
    # Only in this folder are large objects uploaded in parts.
    name = await ground.created("large", data, folder=LEVELS_FOLDER)
    await _sized(ground, name, size_bytes, at=1)
    if await read(ground, name, at=1) != data:
        raise NotKept("get", name, f"{size_bytes:,} bytes came back as others")
    for first in (0, max(0, size_bytes // 2 - EDGE_BYTES // 2), max(0, size_bytes - EDGE_BYTES)):
        if await _range(ground, name, first, EDGE_BYTES) != data[first : first + EDGE_BYTES]:
            raise NotKept("get_range", name, f"bytes from {first:,} on are others")
    outcome, _ = await ground.answered(name, data[::-1], at=1)
    if not isinstance(outcome, Exists) or await _range(ground, name, 0, 100) != data[:100]:
        raise NotKept("create", name, "a second create replaced the object, or says so")
    return Passed(f"{size_bytes:,} bytes")


async def metadata(ground: Scratch) -> Passed | Told:
    """What an object was created with stands beside it; nothing may, but nothing else."""
    given = {"writer_epoch": "7"}
    name = await ground.created("metadata", b"with metadata", given)
    found = (await ground.reader(1).get(name)).metadata
    if not found:
        return Told("lost; the copy inside of each object is the one that counts")
    if dict(found) != given:
        raise NotKept("get", name, f"metadata {given} came back as {dict(found)}")
    return Passed()


async def _sized(ground: Scratch, name: str, size_bytes: int, *, at: int) -> None:
    try:
        found = await ground.reader(at).head(name)
    except ObjectNotFound:
        raise NotKept("head", name, "an object that exists is not found") from None
    if (found.name, found.size_bytes) != (name, size_bytes):
        raise NotKept("head", name, f"{size_bytes:,} bytes are said to be {found.size_bytes:,}")


async def _range(ground: Scratch, name: str, offset: int, length: int) -> bytes:
    try:
        return await ground.reader(1).get_range(name, offset, length)
    except ObjectNotFound:
        raise NotKept("get_range", name, "an object that exists is not found") from None
