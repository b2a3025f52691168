"""Sentences that say what becomes of writers and puts, and fail if something else does."""

from __future__ import annotations

from shalekv.errors import ShaleError
from tests.scenarios.acts import puts
from tests.scenarios.sentences import sentence
from tests.scenarios.stage import ERROR, OPENER, PROCESS, PUT, SERVER, WITH, WRITER, Stage

EPOCH = r"(?: in epoch (?P<epoch>\d+))?"
PAIRS = r"(?P<pairs>nothing|\w+=\w+(?: \w+=\w+)*)"
SEES = rf"(?: and sees {PAIRS})?"


# --- processes and their clients ----------------------------------------------------------------


@sentence(rf"{OPENER} opens{WITH}{EPOCH}{SEES}")
async def opens(
    stage: Stage, process: str, options: str | None, epoch: str | None, pairs: str | None
) -> None:
    """The process opens the database from beginning to end."""
    stage.begin(process, options)
    await has_opened(stage, process, epoch, pairs)


@sentence(rf"{OPENER} has opened{EPOCH}{SEES}")
async def has_opened(stage: Stage, process: str, epoch: str | None, pairs: str | None) -> None:
    """Opening succeeds; writer N and compactor N have epoch N if nothing else is said."""
    opened = await stage.process(process).opened()
    kind, number = process.split()
    if kind != "reader":
        assert opened.epoch == int(epoch or number), f"the epoch is {opened.epoch}"
    if pairs is not None:
        await sees(stage, process, pairs)


@sentence(rf"{SERVER} sees {PAIRS}")
async def sees(stage: Stage, process: str, pairs: str) -> None:
    """These are all keys with their values."""
    stage.server(process).begin_scan()
    await has_scanned(stage, process, pairs)


@sentence(rf"{SERVER} is scanning")
async def is_scanning(stage: Stage, process: str) -> None:
    """A scan that has begun waits for something."""
    assert stage.server(process).is_scanning


@sentence(rf"{SERVER} has scanned {PAIRS}")
async def has_scanned(stage: Stage, process: str, pairs: str) -> None:
    """A scan that has begun returns these keys with their values."""
    wanted = {} if pairs == "nothing" else dict(pair.split("=") for pair in pairs.split())
    assert await stage.server(process).scanned() == wanted


@sentence(rf"{SERVER} gets {PUT}")
async def gets(stage: Stage, process: str, put: str) -> None:
    """A get of the key finds the value."""
    key, _, value = put.partition("=")
    assert await stage.server(process).value(key) == value


@sentence(rf"{WRITER} is fenced")
async def is_fenced(stage: Stage, process: str) -> None:
    """The process ends, because another writer has taken over."""
    await fails(stage, process, "Fenced")


@sentence(rf"{PROCESS} fails: {ERROR}")
async def fails(stage: Stage, process: str, error: str) -> None:
    """The process ends with this error."""
    found = await stage.process(process).end()
    assert isinstance(found, ShaleError), f"it ended with {found!r}"
    assert type(found).__name__ == error, f"it ended with {found!r}"


@sentence(rf"{OPENER} fails to open{WITH}: {ERROR}")
async def fails_to_open(stage: Stage, process: str, options: str | None, error: str) -> None:
    """Opening ends with this error."""
    stage.begin(process, options)
    await fails(stage, process, error)


@sentence(rf"{PROCESS} is opening")
async def is_opening(stage: Stage, process: str) -> None:
    """The process lives, and does not serve yet."""
    opening = stage.process(process)
    assert not opening.has_opened
    assert not opening.has_ended


@sentence(rf"{PROCESS} has not ended")
async def has_not_ended(stage: Stage, process: str) -> None:
    """The process lives."""
    assert not stage.process(process).has_ended


@sentence(rf"{PROCESS} serves")
async def serves(stage: Stage, process: str) -> None:
    """The process has opened, and lives."""
    opening = stage.process(process)
    assert opening.has_opened
    assert not opening.has_ended


@sentence(rf"{WRITER} puts {PUT}: (?P<outcome>acknowledged|{ERROR})")
async def puts_and_waits(
    stage: Stage, process: str, put: str, outcome: str, error: str | None
) -> None:
    """A client sends a put, and waits for what becomes of it."""
    del error  # the outcome says it
    await puts(stage, process, put)
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


@sentence(r"(?P<request>.+) is not sent yet")
async def is_not_sent(stage: Stage, request: str) -> None:
    """Nothing has come to its gate by now."""
    assert not stage.gates[request].arrived_count


@sentence(rf"{SERVER} closes")
async def closes(stage: Stage, process: str) -> None:
    """The process is told to stop: it answers what it has accepted, and its snapshots go."""
    await stage.server(process).close()
