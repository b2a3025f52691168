"""Sentences that say what becomes of writers and puts, and fail if something else does."""

from __future__ import annotations

from shalekv.errors import ShaleError
from tests.scenarios.acts import PUT, WITH, WRITER, puts
from tests.scenarios.sentences import sentence
from tests.scenarios.stage import Stage

EPOCH = r"(?: in epoch (?P<epoch>\d+))?"
SEES = r"(?: and sees (?P<pairs>nothing|\w+=\w+(?: \w+=\w+)*))?"
ERROR = r"(?P<error>[A-Z]\w+)"


# --- writers and their clients ------------------------------------------------------------------


@sentence(rf"{WRITER} opens{WITH}{EPOCH}{SEES}")
async def opens(
    stage: Stage, writer: str, options: str | None, epoch: str | None, pairs: str | None
) -> None:
    """The writer opens the database from beginning to end."""
    stage.begin(writer, options)
    await has_opened(stage, writer, epoch, pairs)


@sentence(rf"{WRITER} has opened{EPOCH}{SEES}")
async def has_opened(stage: Stage, writer: str, epoch: str | None, pairs: str | None) -> None:
    """Opening succeeds; writer N has epoch N if nothing else is said."""
    opened = await stage.opening(writer).opened()
    assert opened.epoch == int(epoch or writer), f"the epoch is {opened.epoch}"
    if pairs is not None:
        await sees(stage, writer, pairs)


@sentence(rf"{WRITER} sees (?P<pairs>.+)")
async def sees(stage: Stage, writer: str, pairs: str) -> None:
    """These are all keys with their values."""
    stage.opening(writer).begin_scan()
    await has_scanned(stage, writer, pairs)


@sentence(rf"{WRITER} is scanning")
async def is_scanning(stage: Stage, writer: str) -> None:
    """A scan that has begun waits for something."""
    assert stage.opening(writer).is_scanning


@sentence(rf"{WRITER} has scanned (?P<pairs>.+)")
async def has_scanned(stage: Stage, writer: str, pairs: str) -> None:
    """A scan that has begun returns these keys with their values."""
    wanted = {} if pairs == "nothing" else dict(pair.split("=") for pair in pairs.split())
    assert await stage.opening(writer).scanned() == wanted


@sentence(rf"{WRITER} gets {PUT}")
async def gets(stage: Stage, writer: str, put: str) -> None:
    """A get of the key finds the value."""
    key, _, value = put.partition("=")
    assert await stage.opening(writer).value(key) == value


@sentence(rf"{WRITER} is fenced")
async def is_fenced(stage: Stage, writer: str) -> None:
    """The process ends, because another writer has taken over."""
    await fails(stage, writer, "Fenced")


@sentence(rf"{WRITER} fails: {ERROR}")
async def fails(stage: Stage, writer: str, error: str) -> None:
    """The process ends with this error."""
    found = await stage.opening(writer).end()
    assert isinstance(found, ShaleError), f"it ended with {found!r}"
    assert type(found).__name__ == error, f"it ended with {found!r}"


@sentence(rf"{WRITER} fails to open{WITH}: {ERROR}")
async def fails_to_open(stage: Stage, writer: str, options: str | None, error: str) -> None:
    """Opening ends with this error."""
    stage.begin(writer, options)
    await fails(stage, writer, error)


@sentence(rf"{WRITER} is opening")
async def is_opening(stage: Stage, writer: str) -> None:
    """The process lives, and does not serve yet."""
    opening = stage.opening(writer)
    assert not opening.has_opened
    assert not opening.has_ended


@sentence(rf"{WRITER} has not ended")
async def has_not_ended(stage: Stage, writer: str) -> None:
    """The process lives."""
    assert not stage.opening(writer).has_ended


@sentence(rf"{WRITER} serves")
async def serves(stage: Stage, writer: str) -> None:
    """The process has opened, and lives."""
    opening = stage.opening(writer)
    assert opening.has_opened
    assert not opening.has_ended


@sentence(rf"{WRITER} puts {PUT}: (?P<outcome>acknowledged|{ERROR})")
async def puts_and_waits(
    stage: Stage, writer: str, put: str, outcome: str, error: str | None
) -> None:
    """A client sends a put, and waits for what becomes of it."""
    del error  # the outcome says it
    await puts(stage, writer, put)
    await becomes(stage, put, outcome)


@sentence(rf"{PUT}: (?P<outcome>\w+)")
async def becomes(stage: Stage, put: str, outcome: str) -> None:
    """What became of a put, once that is known; "pending": it is not known by now."""
    found = stage.puts[put].now() if outcome == "pending" else await stage.puts[put].settled()
    assert found == outcome


@sentence(r"(?P<request>.+) is held")
async def is_held(stage: Stage, request: str) -> None:
    """The request, or reply, is at its gate, once it is."""
    await stage.gates[request].reached()
