"""Whether what was written is read, whole and in ranges, and what was deleted is not."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from shalekv.errors import ObjectNotFound, StoreUnavailable
from shalekv.format.names import LEVELS_FOLDER
from shalekv.store.api import Exists
from shalekv.store.verify.races import read
from shalekv.store.verify.scratch import NotKept, Scratch
from shalekv.store.verify.verdict import CheckPassed, Told

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


async def read_after_write(ground: Scratch) -> CheckPassed:
    """An object is there for everybody once its create has ended."""
    for number in range(REPEATS):
        data = f"written {number}".encode() * (number + 1)
        name = await ground.created(f"write-{number:03d}", data, at=number)
        if await read(ground, name, at=number + 1) != data:
            raise NotKept("get", name, "other bytes are read than were written")
        await _sized(ground, name, len(data), at=number + 2)
    return CheckPassed(f"{REPEATS} objects")


async def read_after_delete(ground: Scratch) -> CheckPassed:
    """An object is gone for everybody once its delete has ended; and deleting nothing is fine."""
    for number in range(REPEATS):
        name = await ground.created(f"delete-{number:03d}", b"deleted", at=number)
        await ground.reader(number).delete([name])
        await gone(ground, name, at=number + 1)
    await ground.reader(0).delete([ground.name("never-made")])
    return CheckPassed(f"{REPEATS} objects")


async def gone(ground: Scratch, name: str, *, at: int) -> None:
    """Nobody reads `name`, which was deleted."""
    try:
        await ground.reader(at).get(name)
    except ObjectNotFound:
        return
    raise NotKept("get", name, "an object that was deleted is still read")


async def ranges(ground: Scratch) -> CheckPassed:
    """Ranges are exact: at both ends, past the end, and counted from the end."""
    data = ground.runtime.random.randbytes(RANGED_BYTES)
    name = await ground.created("ranges", data)
    for offset, length, first, end in _RANGES:
        found = await _range(ground, name, offset, length)
        if found != data[first:end]:
            asked = f"{length:,} from byte {offset:,} on, of {RANGED_BYTES:,}"
            came = f"{len(found):,} came, which are not the right {end - first:,}"
            raise NotKept("get_range", name, f"asked for {asked}: {came}")
    return CheckPassed(f"{len(_RANGES)} ranges")


async def empty_object(ground: Scratch) -> CheckPassed:
    """An object without bytes is one: it is there, listed, and read in any range."""
    name = await ground.created("empty", b"")
    await _sized(ground, name, 0, at=1)
    found = [await read(ground, name, at=1)]
    found += [await _range(ground, name, offset, 10) for offset in (0, 5, -5)]
    if any(found):
        raise NotKept("get", name, "an empty object has bytes")
    if [info.name for info in await ground.listed("empty", at=1)] != [name]:
        raise NotKept("list", name, "an empty object is not shown")
    return CheckPassed()


async def large_object(ground: Scratch) -> CheckPassed:
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
    return CheckPassed(f"{size_bytes:,} bytes")


async def metadata(ground: Scratch) -> CheckPassed | Told:
    """What an object was created with stands beside it; nothing may, but nothing else."""
    given = {"writer_epoch": "7"}
    name = await ground.created("metadata", b"with metadata", given)
    found = (await ground.reader(1).get(name)).metadata
    if not found:
        return Told("lost; the copy inside of each object is the one that counts")
    if dict(found) != given:
        raise NotKept("get", name, f"metadata {given} came back as {dict(found)}")
    return CheckPassed()


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


# --- listing
# Whether lists show everything, once, in the order of bytes, and begin where they are asked to.


LISTED_COUNT = 10  # objects that are created, or deleted, and at once listed by another view
PAGED_NAMES = 1_050  # more than stores show in one reply
_UNORDERED = ("b", "a", "Z", "10", "9", "1", "1.sst", "a-", "a_", "a.b", "c", "a0", "a~", "C1")


async def list_after_write(ground: Scratch) -> CheckPassed:
    """Lists show what a create has made, and no more what a delete has removed."""
    names: list[str] = []
    for number in range(LISTED_COUNT):
        names.append(await ground.created(f"listed-{number:03d}", b"listed", at=number))
        await _shows(ground, "listed-", names, at=number + 1)
    while names:
        await ground.reader(len(names)).delete([names.pop(0)])
        await _shows(ground, "listed-", names, at=len(names) + 2)
    return CheckPassed(f"{2 * LISTED_COUNT} lists")


async def shown(ground: Scratch, name: str) -> None:
    """A list shows `name`, which exists."""
    if name not in [info.name for info in await ground.listed()]:
        raise NotKept("list", name, "an object that exists is not shown")


async def order(ground: Scratch) -> CheckPassed:
    """Lists are in the order of the bytes of the names."""
    names = [ground.name(f"order-{label}") for label in _UNORDERED]
    await ground.created_many(names)
    await _shows(ground, "order-", sorted(names), at=1)
    return CheckPassed()


async def paging(ground: Scratch) -> CheckPassed:
    """A list of more than one page shows each object once, wherever it begins."""
    names = [ground.name(f"paged-{number:06d}") for number in range(PAGED_NAMES)]
    await ground.created_many(names)
    await _shows(ground, "paged-", names, at=1)
    for first in (1, 49, 50, 51, 999, 1_000, 1_001, PAGED_NAMES):
        expected = names[first:]
        await _shows(ground, "paged-", expected, at=1, start_after=names[first - 1])
    return CheckPassed(f"{PAGED_NAMES:,} names")


async def start_after(ground: Scratch) -> CheckPassed:
    """A list begins behind the name it is told, whether an object has it or not."""
    names = [ground.name(f"after-{number:03d}.sst") for number in range(5)]
    await ground.created_many(names)
    for name, expected in (
        (names[0], names[1:]),
        (names[0].removesuffix("t"), names),
        (f"{names[0]}0", names[1:]),
        (names[3], names[4:]),
        (names[4], []),
    ):
        await _shows(ground, "after-", expected, at=1, start_after=name)
    return CheckPassed()


async def _shows(
    ground: Scratch, label: str, expected: Sequence[str], *, at: int, start_after: str = ""
) -> None:
    """A list shows these names, in this order."""
    found = [info.name for info in await ground.listed(label, at=at, start_after=start_after)]
    if found == expected:
        return
    missing = [name for name in expected if name not in set(found)]
    extra = [name for name in found if name not in set(expected)]
    if missing:
        raise NotKept("list", missing[0], f"{len(missing):,} of {len(expected):,} are not shown")
    if extra:
        remark = f"it lies before the beginning of the list, {start_after}, or was deleted"
        raise NotKept(
            "list", extra[0], f"shown, but {remark}" if start_after else "shown, but gone"
        )
    if len(found) != len(expected):
        raise NotKept("list", found[0], "objects are shown twice")
    first = next(
        at for at, pair in enumerate(zip(found, expected, strict=True)) if len({*pair}) > 1
    )
    raise NotKept("list", found[first], "not in the order of the bytes of the names")


# --- moments
# Whether the store tells the time: leases, snapshots and the collector go by its clock.


READINGS = 10
SLACK_MS = 5_000  # stores tell whole seconds, and consist of several machines
_DATE = "Date"


async def clock(ground: Scratch) -> CheckPassed:
    """The store's clock is there, does not go back, and is the one that dates new objects."""
    readings = [await now_ms(ground, at=0)]
    name = await ground.created("dated", b"dated", at=1)
    readings += [await now_ms(ground, at=at) for at in range(READINGS)]
    for before, after in pairwise(readings):
        if after < before - SLACK_MS:
            raise NotKept("now_ms", _DATE, f"the clock went back by {before - after:,} ms")
    modified_ms = (await ground.reader(0).head(name)).modified_ms
    if not readings[0] - SLACK_MS <= modified_ms <= readings[-1] + SLACK_MS:
        apart_ms = modified_ms - readings[0]
        raise NotKept("head", name, f"a new object is dated {apart_ms:+,} ms off the store's clock")
    return CheckPassed(f"{len(readings)} readings")


async def now_ms(ground: Scratch, *, at: int) -> int:
    """What the store's clock shows."""
    try:
        now = await ground.reader(at).now_ms()
    except StoreUnavailable as error:
        raise NotKept("now_ms", _DATE, f"the store does not tell its time: {error}") from error
    if now <= 0:
        raise NotKept("now_ms", _DATE, f"the store's clock shows {now}")
    return now
