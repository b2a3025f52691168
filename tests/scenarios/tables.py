"""Tables: what was tried at the store, in the notation of the seeds, and what it holds."""

from __future__ import annotations

from collections.abc import Sequence

from shalekv.core.sst_table import SstTable
from shalekv.errors import Fenced
from shalekv.format.sst import Sst
from tests.scenarios.attempts import Attempt
from tests.scenarios.sentences import sentence, table
from tests.scenarios.stage import Stage


@table(r"time ")
async def wal_attempts(stage: Stage, rows: list[str]) -> None:
    """Every create in the WAL since the last such table, in the order in which they took effect."""
    attempts = stage.attempts.of("wal")
    shown: list[str] = []
    for time in range(stage.told_attempts, len(attempts)):
        before = attempts[stage.first_attempt : time]
        shown.append(_attempt_row(stage, attempts[time], before))
    stage.told_attempts = len(attempts)
    assert shown == rows


def _attempt_row(stage: Stage, attempt: Attempt, before: Sequence[Attempt]) -> str:
    slot = attempt.object_id - stage.first_slot
    result = "success" if attempt.is_success else attempt.outcome
    if attempt.outcome == "Exists":
        result = f"failure ({_winner(attempt, before)}){_halt(stage, attempt, before)}"
    told = f", {attempt.told}" if attempt.told else ""
    return f"time {len(before)}, {slot:020d}.sst, writer_epoch={attempt.epoch} // {result}{told}"


def _winner(attempt: Attempt, before: Sequence[Attempt]) -> str:
    """Who has won the slot, and when; of recycled names the last who did."""
    for time, other in reversed(list(enumerate(before))):
        if other.is_success and other.object_id == attempt.object_id:
            return f"{other.sender} won at time {time}"
    return "taken before time 0"


def _halt(stage: Stage, attempt: Attempt, before: Sequence[Attempt]) -> str:
    """Whether the sender stops here: it meets a newer writer for the first time, and is fenced."""
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
    hears = attempt.outcome == "Exists" and not attempt.told
    return hears and max(winners, default=0) > attempt.epoch


@table(r"[a-z]+( \d+)? -> ")
async def manifest_attempts(stage: Stage, rows: list[str]) -> None:
    """Every create of a manifest since the last such table, in the order of their effect."""
    attempts = stage.attempts.of("manifest")
    new = attempts[stage.told_manifests :]
    stage.told_manifests = len(attempts)
    assert [_manifest_row(attempt) for attempt in new] == rows


def _manifest_row(attempt: Attempt) -> str:
    mark = "✅" if attempt.is_success else "❌"
    told = attempt.told or (attempt.outcome if attempt.outcome.startswith("lost") else "")
    row = f"{attempt.sender} -> Write manifest/{attempt.object_id:020d}.manifest {mark}"
    return f"{row} {told}".rstrip()


@table(r"\d{20}\.sst, ")
async def wal_contents(stage: Stage, rows: list[str]) -> None:
    """Every object of the WAL that is in the store, from slot 0 on."""
    first = stage.wal_name(0)
    objects = [sst for sst in stage.wal() if sst.properties.name >= first]
    assert [await _contents_row(stage, sst) for sst in objects] == rows


async def _contents_row(stage: Stage, sst: Sst) -> str:
    name = sst.properties.name
    stored = await stage.world.store_for("reader").get(name)
    epoch = sst.properties.writer_epoch
    # Objects carry the epoch as user metadata as well (seed 000, "Attributes").
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
