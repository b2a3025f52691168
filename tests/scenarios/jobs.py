"""Steps of compactors, collectors, readers, and clients that make snapshots."""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any

from shalekv.errors import ShaleError
from shalekv.protocol.manifest import Snapshot
from shalekv.protocol.snapshot import find_snapshot
from tests.scenarios.objects import PAIRS, has_scanned
from tests.scenarios.reading import carry_out_sentence, sentence
from tests.scenarios.serving import ClientProcess, CollectorProcess, CompactorProcess
from tests.scenarios.stage import ERROR, SERVER, WITH, Stage, read_options

COMPACTOR = r"(?P<process>compactor \d+)"
COLLECTOR = r"(?P<process>collector \d+)"
CLIENT = r"(?P<process>client \d+)"
SNAPSHOT = r"snapshot (?P<name>[a-z]+)"
LIFE = r"for (?:(?P<life>\d+) s|ever)"
END = rf"(?P<end>done|{ERROR})"
POLLS_S = 12  # longer than a reader that finds nothing waits between two questions


# --- compactors ---------------------------------------------------------------------------------


@sentence(rf"{COMPACTOR} begins to compact")
async def begins_to_compact(stage: Stage, process: str) -> None:
    _compactor(stage, process).begin_pass()


@sentence(rf"{COMPACTOR} has compacted")
async def has_compacted(stage: Stage, process: str) -> None:
    await stage.jobs(process).done()


@sentence(rf"{COMPACTOR} compacts")
async def compacts(stage: Stage, process: str) -> None:
    await begins_to_compact(stage, process)
    await has_compacted(stage, process)


@sentence(rf"{COMPACTOR} closes")
async def closes(stage: Stage, process: str) -> None:
    _compactor(stage, process).begin_close()
    await stage.jobs(process).done()


def _compactor(stage: Stage, name: str) -> CompactorProcess:
    process = stage.process(name)
    assert isinstance(process, CompactorProcess)
    return process


# --- collectors ---------------------------------------------------------------------------------


@sentence(rf"{COLLECTOR} begins to collect{WITH}")
async def begins_to_collect(stage: Stage, process: str, options: str | None) -> None:
    collector = stage.jobs(process)
    assert isinstance(collector, CollectorProcess)
    collector.begin_collection(read_options(options))


@sentence(rf"{COLLECTOR} has collected")
async def has_collected(stage: Stage, process: str) -> None:
    await stage.jobs(process).done()


@sentence(rf"{COLLECTOR} collects{WITH}")
async def collects(stage: Stage, process: str, options: str | None) -> None:
    await begins_to_collect(stage, process, options)
    await has_collected(stage, process)


# --- clients and their snapshots ----------------------------------------------------------------


@sentence(rf"{CLIENT} creates {SNAPSHOT} {LIFE}")
async def creates(stage: Stage, process: str, name: str, life: str | None) -> None:
    """A snapshot of the current state; the client waits in the background."""
    client = _client(stage, process)
    ttl_ms = _ttl_ms(life)
    client.begin_job(_noted(stage, name, client.role.create(name=name, ttl_ms=ttl_ms)))


@sentence(rf"{CLIENT} shares {SNAPSHOT} as (?P<other>[a-z]+) {LIFE}")
async def shares(stage: Stage, process: str, name: str, other: str, life: str | None) -> None:
    """A second snapshot, of what the first one shows."""
    client = _client(stage, process)
    sharing = client.role.share(name, name=other, ttl_ms=_ttl_ms(life))
    client.begin_job(_noted(stage, other, sharing))


@sentence(rf"{CLIENT} renews {SNAPSHOT} {LIFE}")
async def renews(stage: Stage, process: str, name: str, life: str | None) -> None:
    """Renew the snapshot, to live that long from now on."""
    client = _client(stage, process)
    called = stage.snapshots[name].hex()
    client.begin_job(client.role.renew(called, ttl_ms=_ttl_ms(life)))


@sentence(rf"{CLIENT} deletes {SNAPSHOT}")
async def deletes(stage: Stage, process: str, name: str) -> None:
    client = _client(stage, process)
    client.begin_job(client.role.delete(stage.snapshots[name].hex()))


@sentence(rf"{CLIENT}: {END}")
async def ends(stage: Stage, process: str, end: str, error: str | None) -> None:
    del error  # the end of the process reports it
    found = await stage.process(process).end()
    assert found is None or isinstance(found, ShaleError), f"{process} ended with {found!r}"
    assert (type(found).__name__ if found else "done") == end


@sentence(rf"(?P<what>client (?P<number>\d+) (?:creates|shares|renews|deletes) .+): {END}")
async def wants(stage: Stage, what: str, number: str, end: str, error: str | None) -> None:
    await carry_out_sentence(stage, what)
    await ends(stage, f"client {number}", end, error)


@sentence(rf"{SNAPSHOT} names manifest (?P<manifest_id>\d+)")
async def names_manifest(stage: Stage, name: str, manifest_id: str) -> None:
    """The snapshot is in the current manifest, and its state is this one."""
    found = find_snapshot(stage.current(), stage.snapshots[name])
    assert found is not None
    assert found.manifest_id == int(manifest_id)


@sentence(rf"{SNAPSHOT} is gone")
async def is_gone(stage: Stage, name: str) -> None:
    assert find_snapshot(stage.current(), stage.snapshots[name]) is None


def _client(stage: Stage, name: str) -> ClientProcess:
    process = stage.jobs(name)
    assert isinstance(process, ClientProcess)
    return process


def _ttl_ms(life: str | None) -> int | None:
    return int(life) * 1_000 if life else None


async def _noted(stage: Stage, name: str, making: Coroutine[Any, Any, Snapshot]) -> None:
    stage.snapshots[name] = (await making).id


# --- who reads ----------------------------------------------------------------------------------


@sentence(rf"{SERVER} sees {PAIRS} in {SNAPSHOT}")
async def sees_in(stage: Stage, process: str, pairs: str, name: str) -> None:
    """These are all keys with their values that the snapshot shows."""
    stage.server(process).begin_scan(stage.snapshots[name])
    await has_scanned(stage, process, pairs)


@sentence(rf"{SERVER} cannot read {SNAPSHOT}: {ERROR}")
async def cannot_read(stage: Stage, process: str, name: str, error: str) -> None:
    """A read of the snapshot is refused with this error."""
    server = stage.server(process)
    server.begin_scan(stage.snapshots[name])
    try:
        shown = await server.scanned()
    except ShaleError as refusal:
        found = type(refusal).__name__
    else:
        found = f"it has read {shown}"
    assert found == error


@sentence(r"(?P<process>reader \d+) polls for wal (?P<slot>\d+)")
async def polls_for(stage: Stage, process: str, slot: str) -> None:
    """For some time, this is the only object of the WAL that the reader asks for."""
    since = len(stage.attempts.at_store())
    await stage.sim.sleep_ms(POLLS_S * 1_000)
    assert {*stage.asked_for(process, "get", since)} == {f"wal/{int(slot):020d}.sst"}
