"""Checks of reads, ranges, lists and the clock of a store.

An object is read whole and in ranges as soon as it was created, and no longer once it was deleted.
Lists show every object once, in the order of bytes, and begin where they are asked to. The store
tells the time: leases, snapshots and the collector go by its clock.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from shalekv.errors import ObjectNotFound, StoreUnavailable
from shalekv.format.names import LEVELS_FOLDER
from shalekv.store.api import Exists
from shalekv.store.verify.races import read
from shalekv.store.verify.scratch import Scratch, StoreViolation
from shalekv.store.verify.verdict import CheckPassed, NotOffered

REPEATS = 20  # objects that are written, and at once read by another view
RANGED_BYTES = 1_000
EDGE_BYTES = 1 << 20  # of a large object, read at its ends and in its middle
LISTED_COUNT = 10  # objects that are created or deleted, and at once listed by another view
PAGED_NAMES = 1_050  # more than stores return in one reply
CLOCK_READINGS = 10
CLOCK_SLACK_MS = 5_000  # stores report whole seconds, and consist of several machines

# offset and length, and the first byte and the end that they mean in an object of RANGED_BYTES
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
_UNORDERED = ("b", "a", "Z", "10", "9", "1", "1.sst", "a-", "a_", "a.b", "c", "a0", "a~", "C1")
_DATE = "Date"


async def read_after_write(scratch: Scratch) -> CheckPassed:
    """Check that all views read an object once its create has ended."""
    for number in range(REPEATS):
        data = f"written {number}".encode() * (number + 1)
        name = await scratch.create_new(f"write-{number:03d}", data, at=number)
        if await read(scratch, name, at=number + 1) != data:
            raise StoreViolation("get", name, "other bytes are read than were written")
        await _sized(scratch, name, len(data), at=number + 2)
    return CheckPassed(f"{REPEATS} objects")


async def read_after_delete(scratch: Scratch) -> CheckPassed:
    """Check that no view reads an object once its delete has ended.

    Deleting a name without an object must not be an error.
    """
    for number in range(REPEATS):
        name = await scratch.create_new(f"delete-{number:03d}", b"deleted", at=number)
        await scratch.reader(number).delete([name])
        await check_gone(scratch, name, at=number + 1)
    await scratch.reader(0).delete([scratch.name("never-made")])
    return CheckPassed(f"{REPEATS} objects")


async def check_gone(scratch: Scratch, name: str, *, at: int) -> None:
    """Check that `name`, which was deleted, cannot be read."""
    try:
        await scratch.reader(at).get(name)
    except ObjectNotFound:
        return
    raise StoreViolation("get", name, "an object that was deleted is still read")


async def ranges(scratch: Scratch) -> CheckPassed:
    """Check that ranges are exact: at both ends, past the end, and counted from the end."""
    data = scratch.runtime.random.randbytes(RANGED_BYTES)
    name = await scratch.create_new("ranges", data)
    for offset, length, first, end in _RANGES:
        found = await _range(scratch, name, offset, length)
        if found != data[first:end]:
            asked = f"{length:,} from byte {offset:,} on, of {RANGED_BYTES:,}"
            came = f"{len(found):,} came, which are not the right {end - first:,}"
            raise StoreViolation("get_range", name, f"asked for {asked}: {came}")
    return CheckPassed(f"{len(_RANGES)} ranges")


async def empty_object(scratch: Scratch) -> CheckPassed:
    """Check that an empty object exists, is listed, and can be read in any range."""
    name = await scratch.create_new("empty", b"")
    await _sized(scratch, name, 0, at=1)
    found = [await read(scratch, name, at=1)]
    found += [await _range(scratch, name, offset, 10) for offset in (0, 5, -5)]
    if any(found):
        raise StoreViolation("get", name, "an empty object has bytes")
    if [info.name for info in await scratch.list_own("empty", at=1)] != [name]:
        raise StoreViolation("list", name, "an empty object is not shown")
    return CheckPassed()


async def large_object(scratch: Scratch) -> CheckPassed:
    """Check that an object as large as SSTs is read back whole, and is not replaced."""
    size_bytes = scratch.effort.large_object_bytes
    data = await scratch.runtime.workers.run(scratch.runtime.random.randbytes, size_bytes)
    # Only in this folder are large objects uploaded in parts.
    name = await scratch.create_new("large", data, folder=LEVELS_FOLDER)
    await _sized(scratch, name, size_bytes, at=1)
    if await read(scratch, name, at=1) != data:
        raise StoreViolation("get", name, f"{size_bytes:,} bytes came back as others")
    for first in (0, max(0, size_bytes // 2 - EDGE_BYTES // 2), max(0, size_bytes - EDGE_BYTES)):
        if await _range(scratch, name, first, EDGE_BYTES) != data[first : first + EDGE_BYTES]:
            raise StoreViolation("get_range", name, f"bytes from {first:,} on are others")
    outcome, _ = await scratch.create_until_answered(name, data[::-1], at=1)
    if not isinstance(outcome, Exists) or await _range(scratch, name, 0, 100) != data[:100]:
        raise StoreViolation("create", name, "a second create replaced the object, or says so")
    return CheckPassed(f"{size_bytes:,} bytes")


async def metadata(scratch: Scratch) -> CheckPassed | NotOffered:
    """Check that metadata is kept as it was given, or dropped as a whole, which is allowed."""
    given = {"writer_epoch": "7"}
    name = await scratch.create_new("metadata", b"with metadata", given)
    found = (await scratch.reader(1).get(name)).metadata
    if not found:
        return NotOffered("lost; the copy inside of each object is the one that counts")
    if dict(found) != given:
        raise StoreViolation("get", name, f"metadata {given} came back as {dict(found)}")
    return CheckPassed()


async def _sized(scratch: Scratch, name: str, size_bytes: int, *, at: int) -> None:
    try:
        found = await scratch.reader(at).head(name)
    except ObjectNotFound:
        raise StoreViolation("head", name, "an object that exists is not found") from None
    if (found.name, found.size_bytes) != (name, size_bytes):
        raise StoreViolation(
            "head", name, f"{size_bytes:,} bytes are said to be {found.size_bytes:,}"
        )


async def _range(scratch: Scratch, name: str, offset: int, length: int) -> bytes:
    try:
        return await scratch.reader(1).get_range(name, offset, length)
    except ObjectNotFound:
        raise StoreViolation("get_range", name, "an object that exists is not found") from None


async def list_after_write(scratch: Scratch) -> CheckPassed:
    """Check that lists show created objects at once, and deleted ones no more."""
    names: list[str] = []
    for number in range(LISTED_COUNT):
        names.append(await scratch.create_new(f"listed-{number:03d}", b"listed", at=number))
        await _shows(scratch, "listed-", names, at=number + 1)
    while names:
        await scratch.reader(len(names)).delete([names.pop(0)])
        await _shows(scratch, "listed-", names, at=len(names) + 2)
    return CheckPassed(f"{2 * LISTED_COUNT} lists")


async def check_listed(scratch: Scratch, name: str) -> None:
    """Check that a list shows `name`, which exists."""
    if name not in [info.name for info in await scratch.list_own()]:
        raise StoreViolation("list", name, "an object that exists is not shown")


async def order(scratch: Scratch) -> CheckPassed:
    """Check that lists are in the order of the bytes of the names."""
    names = [scratch.name(f"order-{label}") for label in _UNORDERED]
    await scratch.create_many(names)
    await _shows(scratch, "order-", sorted(names), at=1)
    return CheckPassed()


async def paging(scratch: Scratch) -> CheckPassed:
    """Check that a list of more than one page shows each object once, wherever it begins."""
    names = [scratch.name(f"paged-{number:06d}") for number in range(PAGED_NAMES)]
    await scratch.create_many(names)
    await _shows(scratch, "paged-", names, at=1)
    for first in (1, 49, 50, 51, 999, 1_000, 1_001, PAGED_NAMES):
        expected = names[first:]
        await _shows(scratch, "paged-", expected, at=1, start_after=names[first - 1])
    return CheckPassed(f"{PAGED_NAMES:,} names")


async def start_after(scratch: Scratch) -> CheckPassed:
    """Check that a list begins behind `start_after`, whether that object exists or not."""
    names = [scratch.name(f"after-{number:03d}.sst") for number in range(5)]
    await scratch.create_many(names)
    for name, expected in (
        (names[0], names[1:]),
        (names[0].removesuffix("t"), names),
        (f"{names[0]}0", names[1:]),
        (names[3], names[4:]),
        (names[4], []),
    ):
        await _shows(scratch, "after-", expected, at=1, start_after=name)
    return CheckPassed()


async def _shows(
    scratch: Scratch, label: str, expected: Sequence[str], *, at: int, start_after: str = ""
) -> None:
    """Check that a list shows these names, in this order."""
    found = [info.name for info in await scratch.list_own(label, at=at, start_after=start_after)]
    if found == expected:
        return
    missing = [name for name in expected if name not in set(found)]
    extra = [name for name in found if name not in set(expected)]
    if missing:
        raise StoreViolation(
            "list", missing[0], f"{len(missing):,} of {len(expected):,} are not shown"
        )
    if extra:
        remark = f"it lies before the beginning of the list, {start_after}, or was deleted"
        raise StoreViolation(
            "list", extra[0], f"shown, but {remark}" if start_after else "shown, but gone"
        )
    if len(found) != len(expected):
        raise StoreViolation("list", found[0], "objects are shown twice")
    first = next(
        at for at, pair in enumerate(zip(found, expected, strict=True)) if len({*pair}) > 1
    )
    raise StoreViolation("list", found[first], "not in the order of the bytes of the names")


async def clock(scratch: Scratch) -> CheckPassed:
    """Check that the store has a clock, which does not go back, and dates new objects by it."""
    readings = [await now_ms(scratch, at=0)]
    name = await scratch.create_new("dated", b"dated", at=1)
    readings += [await now_ms(scratch, at=at) for at in range(CLOCK_READINGS)]
    for before, after in pairwise(readings):
        if after < before - CLOCK_SLACK_MS:
            raise StoreViolation("now_ms", _DATE, f"the clock went back by {before - after:,} ms")
    modified_ms = (await scratch.reader(0).head(name)).modified_ms
    if not readings[0] - CLOCK_SLACK_MS <= modified_ms <= readings[-1] + CLOCK_SLACK_MS:
        apart_ms = modified_ms - readings[0]
        raise StoreViolation(
            "head", name, f"a new object is dated {apart_ms:+,} ms off the store's clock"
        )
    return CheckPassed(f"{len(readings)} readings")


async def now_ms(scratch: Scratch, *, at: int) -> int:
    """Read the store's clock, and check that it has a time."""
    try:
        now = await scratch.reader(at).now_ms()
    except StoreUnavailable as error:
        raise StoreViolation(
            "now_ms", _DATE, f"the store does not tell its time: {error}"
        ) from error
    if now <= 0:
        raise StoreViolation("now_ms", _DATE, f"the store's clock shows {now}")
    return now
