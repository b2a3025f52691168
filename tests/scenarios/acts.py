"""Steps in which a process or a client acts."""

from __future__ import annotations

from dataclasses import replace

from shalekv.format import names
from shalekv.format.footer import SstProperties
from shalekv.protocol.entry import Entry, Kind
from shalekv.protocol.manifest import Manifest
from shalekv.settings import StoreSettings
from shalekv.store.cas import CasStore
from shalekv.store.manifests import Edit, StoredManifest
from shalekv.write.commit import WalContents
from shalekv.write.wal import EPOCH_METADATA, encode_wal
from tests.scenarios.reading import sentence
from tests.scenarios.serving import Put
from tests.scenarios.stage import OPENER, PROCESS, PUT, SERVER, WITH, WRITER, Stage
from tests.sim.faults import Span
from tests.sim.network import Match

REQUEST = (
    rf"{PROCESS}'s (?:(?P<nth>\d+)(?:st|nd|rd|th) )?"
    r"(?P<operation>create|list|get|delete|put|insert|find|copy|commit|delete_committed)"
    r" of (?P<folder>wal|manifest|levels)"
    r"(?: (?P<object_id>\d+))?"
)

# Steps of a two-phase create; the temporary object's name begins with the destination's.
STEPS = frozenset({"put", "insert", "copy", "commit", "delete"})


# --- processes and their clients ----------------------------------------------------------------


@sentence(rf"{OPENER} begins to open{WITH}")
async def begins_to_open(stage: Stage, process: str, options: str | None) -> None:
    stage.begin(process, options)


@sentence(rf"{WRITER} puts {PUT}")
async def puts(stage: Stage, process: str, put: str) -> None:
    """A client sends a put, and waits in the background."""
    assert put not in stage.puts, f"{put} was put before"
    key, _, value = put.partition("=")
    stage.puts[put] = Put(stage.writer(process), key, value)


@sentence(rf"{SERVER} begins to scan")
async def begins_to_scan(stage: Stage, process: str) -> None:
    """A client asks for everything, and waits in the background."""
    stage.server(process).begin_scan()


@sentence(rf"pause {PROCESS}")
async def pause(stage: Stage, process: str) -> None:
    stage.sim.pause(stage.process(process).node)


@sentence(rf"resume {PROCESS}")
async def resume(stage: Stage, process: str) -> None:
    stage.sim.resume(stage.process(process).node)


@sentence(rf"crash {PROCESS}")
async def crash(stage: Stage, process: str) -> None:
    """The process is gone; what it has sent is on its way."""
    stage.sim.crash(stage.process(process).node)


@sentence(r"(?P<seconds>\d+) s pass")
async def time_passes(stage: Stage, seconds: str) -> None:
    """Everybody has time to do what they want to do."""
    await stage.sim.sleep_ms(int(seconds) * 1000.0)


@sentence(r"count time and slots from here")
async def count_from_here(stage: Stage) -> None:
    """The next slot is slot 0, the next create in the WAL has time 0; before it are fences."""
    assert not any(sst.footer.contents.entry_count for sst in stage.wal())
    stage.first_slot = len(stage.sim.store.names(names.WAL_FOLDER))
    stage.first_attempt = stage.listed_attempts = len(stage.attempts.of("wal"))


# --- the way to the store -----------------------------------------------------------------------


@sentence(rf"hold (?P<request>{REQUEST})")
async def hold(stage: Stage, request: str, **which: str | None) -> None:
    """Keep the request at the store when it arrives there."""
    stage.gates[request] = stage.sim.store.hold(_match(stage, **which))


@sentence(rf"hold (?P<reply>the reply to {REQUEST})")
async def hold_reply(stage: Stage, reply: str, **which: str | None) -> None:
    """Apply the request when it arrives at the store, and keep the reply there."""
    stage.gates[reply] = stage.sim.store.hold_reply(_match(stage, **which))


@sentence(r"release (?P<request>.+)")
async def release(stage: Stage, request: str) -> None:
    """Release the request, or reply, once it is at its gate."""
    gate = stage.gates[request]
    await gate.reached()
    gate.release()


@sentence(rf"lose {REQUEST}")
async def lose(stage: Stage, **which: str | None) -> None:
    """The request is never applied, and its sender gets no reply."""
    match = _match(stage, **which)
    stage.sim.store.lose_request(match)
    _expect_fault(stage, match, "lost on its way")


@sentence(rf"lose the reply to {REQUEST}")
async def lose_reply(stage: Stage, **which: str | None) -> None:
    """The request is applied, and its sender gets no reply."""
    match = _match(stage, **which)
    stage.sim.store.lose_reply(match)
    _expect_fault(stage, match, "(reply lost)")


@sentence(rf"delay {REQUEST} by (?P<late>\d+) ms")
async def delay(stage: Stage, late: str, **which: str | None) -> None:
    """The sender gets no reply and gives up; after that time the request arrives."""
    late_ms = float(late)
    store = stage.sim.store
    store.faults = replace(store.faults, late_ms=Span(late_ms, late_ms))
    match = _match(stage, **which)
    store.delay(match)
    _expect_fault(stage, match, "(late)")


def _match(stage: Stage, **which: str | None) -> Match:
    folder, object_id, nth = which["folder"], which["object_id"], which["nth"]
    name = f"{folder}/*"
    if which["operation"] == "list":
        name = f"{folder}/"
    elif object_id is not None:
        name_of = stage.wal_name if folder == "wal" else names.manifest_name
        name = name_of(int(object_id)) + "*" * (which["operation"] in STEPS)
    operation = which["operation"] or "*"
    return Match(operation, name, str(which["process"]), int(nth or 1))


def _expect_fault(stage: Stage, match: Match, fault: str) -> None:
    name = "*" if match.operation == "copy" else match.name  # it names two objects
    stage.faults[f"{match.operation} {name} of {match.node}: "] = fault


# --- others who reach into the store ------------------------------------------------------------


@sentence(r"the compactor opens")
async def compactor_opens(stage: Stage) -> None:
    def edit(manifest: Manifest) -> Manifest:
        return replace(manifest, compactor_epoch=manifest.compactor_epoch + 1)

    await _edit_manifest(stage, edit)


@sentence(r"the compactor has compacted wal 0-(?P<last>\d+)")
async def compacts(stage: Stage, last: str) -> None:
    """Edit the manifest alone; the contents of these slots are in no level here."""
    last_id = stage.first_slot + int(last)
    seqs = [sst.footer.contents.max_seq for sst in stage.wal()[: last_id + 1]]

    def edit(manifest: Manifest) -> Manifest:
        return replace(manifest, wal_id_last_compacted=last_id, last_compacted_seq=max(seqs))

    await _edit_manifest(stage, edit)


@sentence(r"the collector deletes (?P<folder>wal|manifest) (?P<first>\d+)-(?P<last>\d+)")
async def deletes(stage: Stage, folder: str, first: str, last: str) -> None:
    name_of = stage.wal_name if folder == "wal" else names.manifest_name
    doomed = [name_of(object_id) for object_id in range(int(first), int(last) + 1)]
    node = stage.sim.node("collector")
    await node.run(stage.sim.store_for(node).delete(doomed))


@sentence(rf"a stranger of epoch (?P<epoch>\d+) fills wal (?P<slot>\d+)(?: with {PUT})?")
async def stranger_fills(stage: Stage, epoch: str, slot: str, put: str | None) -> None:
    """An object appears that no writer of this scenario has written: the store broke its word."""
    node = stage.sim.node("stranger")
    random = stage.sim.runtime_for(node).random
    properties = SstProperties(
        name=stage.wal_name(int(slot)),
        database_id=stage.manifest(0).database_id,
        writer_epoch=int(epoch),
        writer_nonce=random.randbytes(16),
        write_id=random.randbytes(16),
    )
    key, _, value = (put or "").encode().partition(b"=")
    entries = [Entry(key, 1 << 40, Kind.PUT, value)] if put else []
    data = encode_wal(properties, WalContents(entries), 64 * 1024)
    store = stage.sim.store_for(node)
    await node.run(store.create(properties.name, data, {EPOCH_METADATA: epoch}))


async def _edit_manifest(stage: Stage, edit: Edit) -> None:
    """Edit with the shipped code, on a node of its own."""
    sim = stage.sim
    node = sim.node("compactor")
    store = CasStore(sim.store_for(node), sim.runtime_for(node), StoreSettings())
    before = stage.manifest_ids()[-1]
    await node.run(StoredManifest(store).edit(edit, lambda m: m.manifest_id > before))
