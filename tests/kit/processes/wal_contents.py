"""Contents of the WAL of a database on `file://`, read from its files without a server.

Its commits are compared with what clients know: an acknowledged write must be in the slot that was
reported, whole, in order, and once.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass
from pathlib import Path

from shalekv.format import names
from shalekv.format.manifest import decode_manifest
from shalekv.format.sst import open_sst
from shalekv.protocol.entry import Kind
from shalekv.protocol.manifest import Manifest
from tests.kit.processes.history import Attempt, Fate, Found, History

Changes = dict[bytes, bytes | None]


@dataclass(frozen=True, slots=True)
class WalObject:
    """One WAL object: whose it is, and its commits by sequence number."""

    wal_id: int
    epoch: int
    commits: dict[int, Changes]


def wal_path(folder: Path, wal_id: int) -> Path:
    """The file of a WAL object of the database in `folder`."""
    return folder / names.wal_name(wal_id)


def manifest_path(folder: Path, manifest_id: int) -> Path:
    """The file of a manifest of the database in `folder`."""
    return folder / names.manifest_name(manifest_id)


def wal_ids(folder: Path) -> list[int]:
    """The ids of the WAL objects in the database in `folder`, in order."""
    files = (folder / names.WAL_FOLDER).glob("*.sst")
    parsed = (names.parse_wal_name(names.WAL_FOLDER + file.name) for file in files)
    return sorted(wal_id for wal_id in parsed if wal_id is not None)


def manifest_ids(folder: Path) -> list[int]:
    """The ids of the manifests of the database in `folder`, in order."""
    files = (folder / names.MANIFEST_FOLDER).glob("*.manifest")
    parsed = (names.parse_manifest_name(names.MANIFEST_FOLDER + file.name) for file in files)
    return sorted(manifest_id for manifest_id in parsed if manifest_id is not None)


def read_manifest(folder: Path, manifest_id: int) -> Manifest:
    data = manifest_path(folder, manifest_id).read_bytes()
    return decode_manifest(names.manifest_name(manifest_id), data)


def current_manifest(folder: Path) -> Manifest:
    return read_manifest(folder, manifest_ids(folder)[-1])


def read_wal(folder: Path) -> list[WalObject]:
    """Every WAL object of the database in `folder`, by id."""
    return [_read(folder, wal_id) for wal_id in wal_ids(folder)]


def is_fence(path: Path) -> bool:
    sst = open_sst(f"{names.WAL_FOLDER}{path.name}", path.read_bytes(), database_id=None)
    return sst.footer.contents.entry_count == 0


def state_of(wal: list[WalObject]) -> dict[bytes, Found]:
    """Return the state that this log leads to, computed without the engine."""
    state: dict[bytes, Found] = {}
    for each in wal:
        for seq, changes in sorted(each.commits.items()):
            for key, value in changes.items():
                if value is None:
                    state.pop(key, None)
                else:
                    state[key] = Found(value, seq)
    return state


def check_wal(wal: list[WalObject], history: History) -> None:
    """Judge a whole WAL by what clients know of it; raises `Violation`."""
    _check_order(wal, history)
    by_seq = {seq: (at, changes) for at in wal for seq, changes in at.commits.items()}
    for attempt in history.of_fate(Fate.ACKNOWLEDGED):
        _check_acknowledged(attempt, by_seq, history)
    _check_origins(by_seq, history)


def _read(folder: Path, wal_id: int) -> WalObject:
    name = names.wal_name(wal_id)
    sst = open_sst(name, (folder / name).read_bytes(), database_id=None)
    commits: dict[int, Changes] = defaultdict(dict)
    for entry in sst.entries():
        commits[entry.seq][entry.key] = entry.value if entry.kind is Kind.PUT else None
    return WalObject(wal_id, sst.properties.writer_epoch, dict(commits))


def _check_order(wal: list[WalObject], history: History) -> None:
    """Ids have no gap, and slot order is sequence order (I4)."""
    if [each.wal_id for each in wal] != list(range(len(wal))):
        raise history.violation(f"gaps in the WAL: {[each.wal_id for each in wal]}")
    last_seq = 0
    for each in wal:
        if each.commits and min(each.commits) <= last_seq:
            raise history.violation(f"slot {each.wal_id} goes back to {min(each.commits)}")
        last_seq = max(each.commits, default=last_seq)


def _check_acknowledged(
    attempt: Attempt, by_seq: dict[int, tuple[WalObject, Changes]], history: History
) -> None:
    """Check that each acknowledged write is in the object that its reply named (I1)."""
    commit = attempt.commit
    assert commit is not None
    if commit.seq not in by_seq:
        raise history.violation(f"missing in the WAL: {attempt}")
    at, changes = by_seq[commit.seq]
    if (at.wal_id, at.epoch) != (commit.wal_id, commit.epoch):
        raise history.violation(f"{attempt}: is in {at.wal_id} of epoch {at.epoch}, not {commit}")
    if changes != attempt.changes:
        raise history.violation(f"{attempt}: the WAL has {changes}")


def _check_origins(by_seq: dict[int, tuple[WalObject, Changes]], history: History) -> None:
    """Check that each commit in the WAL is one whole attempt, not refused, and occurs once."""
    acknowledged = {a.seq: a for a in history.of_fate(Fate.ACKNOWLEDGED)}
    untagged: Counter[frozenset[bytes]] = Counter(
        frozenset(a.changes) for a in history.of_fate(Fate.UNKNOWN) if not any(a.changes.values())
    )
    seen: set[int] = set()
    for seq, (at, changes) in by_seq.items():
        tags = _numbers(changes)
        if seq in acknowledged:
            tags |= {acknowledged[seq].number}
        where = f"commit {seq} in slot {at.wal_id}"
        if not tags:  # deletes alone, which carry no number
            untagged[frozenset(changes)] -= 1
            if untagged[frozenset(changes)] < 0:
                raise history.violation(f"{where}: nobody sent the deletes of {list(changes)}")
            continue
        if len(tags) > 1 or tags & seen:
            raise history.violation(f"{where}: attempts {tags} are mixed, or there twice")
        seen |= tags
        attempt = history.attempts[tags.pop()]
        if attempt.fate is Fate.REFUSED or changes != attempt.changes:
            raise history.violation(f"{where} is {changes}, but {attempt}: {attempt.changes}")


def _numbers(changes: Changes) -> set[int]:
    """The attempts that the values of a commit come from."""
    return {int(value.partition(b":")[0]) for value in changes.values() if value is not None}
