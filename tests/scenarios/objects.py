"""Sentences and tables about all objects: which stay, which go, and what the levels hold."""

from __future__ import annotations

from collections.abc import Sequence

from shalekv.errors import Fenced, ShaleError
from shalekv.format import names
from shalekv.format.sst import Sst, open_sst
from shalekv.protocol.entry import Entry, Kind
from shalekv.protocol.manifest import Version
from shalekv.protocol.sst_table import SstTable
from tests.scenarios.acts import puts
from tests.scenarios.reading import sentence, table
from tests.scenarios.stage import ERROR, OPENER, PROCESS, PUT, SERVER, WITH, WRITER, Attempt, Stage


@table(r"time ")
async def wal_attempts(stage: Stage, rows: list[str]) -> None:
    """Every create in the WAL since the last such table, in the order in which they took effect."""
    attempts = stage.attempts.of("wal")
    shown: list[str] = []
    for time in range(stage.listed_attempts, len(attempts)):
        before = attempts[stage.first_attempt : time]
        shown.append(_attempt_row(stage, attempts[time], before))
    stage.listed_attempts = len(attempts)
    assert shown == rows


def _attempt_row(stage: Stage, attempt: Attempt, before: Sequence[Attempt]) -> str:
    slot = attempt.object_id - stage.first_slot
    result = "success" if attempt.is_success else attempt.outcome
    if attempt.outcome == "Exists":
        result = f"failure ({_winner(attempt, before)}){_halt(stage, attempt, before)}"
    unheard = f", {attempt.unheard}" if attempt.unheard else ""
    return f"time {len(before)}, {slot:020d}.sst, writer_epoch={attempt.epoch} // {result}{unheard}"


def _winner(attempt: Attempt, before: Sequence[Attempt]) -> str:
    """Return the winner of the slot, and when; of recycled names the last one."""
    for time, other in reversed(list(enumerate(before))):
        if other.is_success and other.object_id == attempt.object_id:
            return f"{other.sender} won at time {time}"
    return "taken before time 0"


def _halt(stage: Stage, attempt: Attempt, before: Sequence[Attempt]) -> str:
    """Say if the sender stops here: it meets a newer writer for the first time, and is fenced."""
    if not _meets_newer(attempt, before):
        return ""
    of_sender = [(n, other) for n, other in enumerate(before) if other.sender == attempt.sender]
    if any(_meets_newer(other, before[:n]) for n, other in of_sender):
        return ""
    opening = stage.processes.get(attempt.sender)
    is_fenced = opening is not None and isinstance(opening.error_now(), Fenced)
    return f", {attempt.sender} halts" if is_fenced else ""


def _meets_newer(attempt: Attempt, before: Sequence[Attempt]) -> bool:
    winners = [o.epoch for o in before if o.is_success and o.object_id == attempt.object_id]
    hears = attempt.outcome == "Exists" and not attempt.unheard
    return hears and max(winners, default=0) > attempt.epoch


@table(r"[a-z]+( \d+)? -> ")
async def manifest_attempts(stage: Stage, rows: list[str]) -> None:
    """Every create of a manifest since the last such table, in the order of their effect."""
    attempts = stage.attempts.of("manifest")
    new = attempts[stage.listed_manifests :]
    stage.listed_manifests = len(attempts)
    assert [_manifest_row(attempt) for attempt in new] == rows


def _manifest_row(attempt: Attempt) -> str:
    mark = "✅" if attempt.is_success else "❌"
    unheard = attempt.unheard or (attempt.outcome if attempt.outcome.startswith("lost") else "")
    row = f"{attempt.sender} -> Write manifest/{attempt.object_id:020d}.manifest {mark}"
    return f"{row} {unheard}".rstrip()


@table(r"\d{20}\.sst, ")
async def wal_contents(stage: Stage, rows: list[str]) -> None:
    """Every object of the WAL that is in the store, from slot 0 on."""
    first = stage.wal_name(0)
    objects = [sst for sst in stage.wal() if sst.properties.name >= first]
    assert [await _contents_row(stage, sst) for sst in objects] == rows


async def _contents_row(stage: Stage, sst: Sst) -> str:
    name = sst.properties.name
    stored = await stage.sim.store_for("reader").get(name)
    epoch = sst.properties.writer_epoch
    # Objects carry the epoch as user metadata as well.
    assert stored.metadata == {"writer_epoch": str(epoch)}
    slot = int(name.removesuffix(".sst").rpartition("/")[2]) - stage.first_slot
    pairs = [f"{entry.key.decode()}={entry.value.decode()}" for entry in sst.entries()]
    return f"{slot:020d}.sst, writer_epoch={epoch}: {' '.join(pairs) or 'empty'}"


# --- single objects -----------------------------------------------------------------------------


@sentence(r"manifest (?P<manifest_id>\d+): (?P<fields>\w+=\w+(?:, \w+=\w+)*)")
async def manifest_holds(stage: Stage, manifest_id: str, fields: str) -> None:
    """A manifest holds these values; of snapshots, leases and SSTs their number."""
    manifest = stage.manifest(int(manifest_id))
    wanted = dict(field.split("=") for field in fields.split(", "))
    assert {name: _field(stage, name, getattr(manifest, name)) for name in wanted} == wanted


def _field(stage: Stage, name: str, value: object) -> str:
    if isinstance(value, tuple | SstTable):
        return str(len(value))
    if isinstance(value, int) and name.startswith("wal_id_"):
        return str(value - stage.first_slot)
    return str(value)


@sentence(r"the manifests are (?P<first>\d+)-(?P<last>\d+)")
async def manifests_are(stage: Stage, first: str, last: str) -> None:
    """These are all manifests that are in the store."""
    assert stage.manifest_ids() == list(range(int(first), int(last) + 1))


@sentence(r"the manifests are (?P<numbers>\d+(?: \d+)*)")
async def manifests_are_these(stage: Stage, numbers: str) -> None:
    """These are all manifests that are in the store."""
    assert stage.manifest_ids() == [int(number) for number in numbers.split()]


@sentence(r"wal (?P<slot>\d+) bears the nonce of manifest (?P<manifest_id>\d+)")
async def bears_nonce(stage: Stage, slot: str, manifest_id: str) -> None:
    """The object and the manifest are of one opening."""
    name = stage.wal_name(int(slot))
    (sst,) = [sst for sst in stage.wal() if sst.properties.name == name]
    assert sst.properties.writer_nonce == stage.manifest(int(manifest_id)).writer_nonce


@sentence(r"manifest (?P<manifest_id>\d+) has a snapshot of its writer")
async def has_snapshot(stage: Stage, manifest_id: str) -> None:
    """It keeps what the manifest before it needs, WAL included, while the writer opens."""
    manifest = stage.manifest(int(manifest_id))
    found = [(snapshot.id, snapshot.manifest_id) for snapshot in manifest.snapshots]
    assert (manifest.writer_nonce, int(manifest_id)) in found


@sentence(r"manifest (?P<manifest_id>\d+) has snapshots of manifests? (?P<numbers>\d+(?: \d+)*)")
async def has_snapshots_of(stage: Stage, manifest_id: str, numbers: str) -> None:
    """These are the manifests that its snapshots name, oldest snapshot first."""
    found = [snapshot.manifest_id for snapshot in stage.manifest(int(manifest_id)).snapshots]
    assert found == [int(number) for number in numbers.split()]


@sentence(r"slot order is sequence order")
async def slots_are_ordered(stage: Stage) -> None:
    """The sequence numbers of each object lie above those of the objects before it (I4)."""
    last_seq = 0
    for contents in (sst.footer.contents for sst in stage.wal() if sst.footer.contents.entry_count):
        assert contents.min_seq > last_seq
        last_seq = contents.max_seq
    assert last_seq > 0


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
    """Opening succeeds; writer N and compactor N have epoch N unless the step has another."""
    opened = await stage.process(process).opened()
    kind, number = process.split()
    if kind != "reader":
        assert opened.epoch == int(epoch or number), f"the epoch is {opened.epoch}"
    if pairs is not None:
        await sees(stage, process, pairs)


@sentence(rf"{SERVER} sees {PAIRS}")
async def sees(stage: Stage, process: str, pairs: str) -> None:
    stage.server(process).begin_scan()
    await has_scanned(stage, process, pairs)


@sentence(rf"{SERVER} is scanning")
async def is_scanning(stage: Stage, process: str) -> None:
    assert stage.server(process).is_scanning


@sentence(rf"{SERVER} has scanned {PAIRS}")
async def has_scanned(stage: Stage, process: str, pairs: str) -> None:
    """A scan that has begun returns these keys with their values."""
    wanted = {} if pairs == "nothing" else dict(pair.split("=") for pair in pairs.split())
    assert await stage.server(process).scanned() == wanted


@sentence(rf"{SERVER} gets {PUT}")
async def gets(stage: Stage, process: str, put: str) -> None:
    key, _, value = put.partition("=")
    assert await stage.server(process).value(key) == value


@sentence(rf"{WRITER} is fenced")
async def is_fenced(stage: Stage, process: str) -> None:
    """The process ends, because another writer has taken over."""
    await fails(stage, process, "Fenced")


@sentence(rf"{PROCESS} fails: {ERROR}")
async def fails(stage: Stage, process: str, error: str) -> None:
    found = await stage.process(process).end()
    assert isinstance(found, ShaleError), f"it ended with {found!r}"
    assert type(found).__name__ == error, f"it ended with {found!r}"


@sentence(rf"{OPENER} fails to open{WITH}: {ERROR}")
async def fails_to_open(stage: Stage, process: str, options: str | None, error: str) -> None:
    stage.begin(process, options)
    await fails(stage, process, error)


@sentence(rf"{PROCESS} is opening")
async def is_opening(stage: Stage, process: str) -> None:
    opening = stage.process(process)
    assert not opening.has_opened
    assert not opening.has_ended


@sentence(rf"{PROCESS} has not ended")
async def has_not_ended(stage: Stage, process: str) -> None:
    assert not stage.process(process).has_ended


@sentence(rf"{PROCESS} serves")
async def serves(stage: Stage, process: str) -> None:
    opening = stage.process(process)
    assert opening.has_opened
    assert not opening.has_ended


@sentence(rf"{WRITER} puts {PUT}: (?P<outcome>acknowledged|{ERROR})")
async def puts_and_waits(
    stage: Stage, process: str, put: str, outcome: str, error: str | None
) -> None:
    """A client sends a put, and waits for what becomes of it."""
    del error  # the outcome has it
    await puts(stage, process, put)
    await becomes(stage, put, outcome)


@sentence(rf"{PUT}: (?P<outcome>\w+)")
async def becomes(stage: Stage, put: str, outcome: str) -> None:
    """Compare the outcome of a put, once it is known; "pending": it is not known by now."""
    found = stage.puts[put].now() if outcome == "pending" else await stage.puts[put].settled()
    assert found == outcome


@sentence(r"(?P<request>.+) is held")
async def is_held(stage: Stage, request: str) -> None:
    """The request, or reply, is at its gate, once it is."""
    await stage.gates[request].reached()


@sentence(r"(?P<request>.+) is not sent yet")
async def is_not_sent(stage: Stage, request: str) -> None:
    assert not stage.gates[request].arrived_count


@sentence(rf"{SERVER} closes")
async def closes(stage: Stage, process: str) -> None:
    """Stop the process in order: it answers what it has accepted, and deletes its snapshots."""
    await stage.server(process).close()


FOLDERS = (names.MANIFEST_FOLDER, names.WAL_FOLDER, names.LEVELS_FOLDER)


@table(r"(manifest|wal|levels)/\S+ (stays|goes)")
async def stays_and_goes(stage: Stage, rows: list[str]) -> None:
    """All objects of the folders that are mentioned; gone are those that went since the last."""
    mentioned = {f"{row.partition('/')[0]}/" for row in rows}
    shown = [row for folder in FOLDERS if folder in mentioned for row in _fates(stage, folder)]
    assert shown == rows


def _fates(stage: Stage, folder: str) -> list[str]:
    log = stage.sim.store.log
    since = stage.listed_changes.get(folder, 0)
    stage.listed_changes[folder] = len(log)
    there = stage.sim.store.names(folder)
    gone = {entry.name for entry in log[since:] if entry.operation == "delete"}
    first = stage.wal_name(0)
    found = [
        stage.shown(name)
        for name in {*there, *gone}
        if name.startswith(folder) and (folder != names.WAL_FOLDER or name >= first)
    ]
    kept = {stage.shown(name) for name in there}
    return [f"{name} {'stays' if name in kept else 'goes'}" for name in sorted(found)]


@table(r"levels/\d+\.sst, ")
async def level_contents(stage: Stage, rows: list[str]) -> None:
    """The SSTs of the current manifest, in the order in which reads meet them: L0, newest first."""
    version = Version.of(stage.current())
    ssts = [*version.l0, *(info for run in version.runs for info in run.ssts)]
    assert [_level_row(stage, info.id, info.level) for info in ssts] == rows


def _level_row(stage: Stage, sst_id: bytes, level: int) -> str:
    name = names.level_name(sst_id)
    sst = open_sst(name, stage.data(name), database_id=None)
    return f"{stage.shown(name)}, level {level}: {' '.join(map(_pair, sst.entries()))}"


def _pair(entry: Entry) -> str:
    value = entry.value.decode() if entry.kind is Kind.PUT else "deleted"
    return f"{entry.key.decode()}={value}"


@sentence(r"somebody leaves (?P<name>(?:manifest|wal|levels)/\S+)")
async def leaves(stage: Stage, name: str) -> None:
    """An object appears that is none of a database."""
    node = stage.sim.node("somebody")
    await node.run(stage.sim.store_for(node).create(name, b"not ours"))
