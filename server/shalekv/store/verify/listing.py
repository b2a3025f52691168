"""Whether lists show everything, once, in the order of bytes, and begin where they are asked to."""

from __future__ import annotations

from collections.abc import Sequence

from shalekv.store.verify.scratch import NotKept, Scratch
from shalekv.store.verify.verdict import Passed

LISTED_COUNT = 10  # objects that are created, or deleted, and at once listed by another view
PAGED_NAMES = 1_050  # more than stores show in one reply
_UNORDERED = ("b", "a", "Z", "10", "9", "1", "1.sst", "a-", "a_", "a.b", "c", "a0", "a~", "C1")


async def list_after_write(ground: Scratch) -> Passed:
    """Lists show what a create has made, and no more what a delete has removed."""
    names: list[str] = []
    for number in range(LISTED_COUNT):
        names.append(await ground.created(f"listed-{number:03d}", b"listed", at=number))
        await _shows(ground, "listed-", names, at=number + 1)
    while names:
        await ground.reader(len(names)).delete([names.pop(0)])
        await _shows(ground, "listed-", names, at=len(names) + 2)
    return Passed(f"{2 * LISTED_COUNT} lists")


async def shown(ground: Scratch, name: str) -> None:
    """A list shows `name`, which exists."""
    if name not in [info.name for info in await ground.listed()]:
        raise NotKept("list", name, "an object that exists is not shown")


async def order(ground: Scratch) -> Passed:
    """Lists are in the order of the bytes of the names."""
    names = [ground.name(f"order-{label}") for label in _UNORDERED]
    await ground.created_many(names)
    await _shows(ground, "order-", sorted(names), at=1)
    return Passed()


async def paging(ground: Scratch) -> Passed:
    """A list of more than one page shows each object once, wherever it begins."""
    names = [ground.name(f"paged-{number:06d}") for number in range(PAGED_NAMES)]
    await ground.created_many(names)
    await _shows(ground, "paged-", names, at=1)
    for first in (1, 49, 50, 51, 999, 1_000, 1_001, PAGED_NAMES):
        expected = names[first:]
        await _shows(ground, "paged-", expected, at=1, start_after=names[first - 1])
    return Passed(f"{PAGED_NAMES:,} names")


async def start_after(ground: Scratch) -> Passed:
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
    return Passed()


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
