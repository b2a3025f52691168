"""Sentences and tables about all objects: which stay, which go, and what the levels hold."""

from __future__ import annotations

from shalekv.core.entry import Entry, Kind
from shalekv.core.tree import Tree
from shalekv.format import names
from shalekv.format.sst import open_sst
from tests.scenarios.sentences import sentence, table
from tests.scenarios.stage import Stage

FOLDERS = (names.MANIFEST_FOLDER, names.WAL_FOLDER, names.LEVELS_FOLDER)


@table(r"(manifest|wal|levels)/\S+ (stays|goes)")
async def stays_and_goes(stage: Stage, rows: list[str]) -> None:
    """All objects of the folders that are mentioned; gone are those that went since the last."""
    mentioned = {f"{row.partition('/')[0]}/" for row in rows}
    shown = [row for folder in FOLDERS if folder in mentioned for row in _fates(stage, folder)]
    assert shown == rows


def _fates(stage: Stage, folder: str) -> list[str]:
    log = stage.world.store.log
    since = stage.told_changes.get(folder, 0)
    stage.told_changes[folder] = len(log)
    there = stage.world.store.names(folder)
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
    tree = Tree.of(stage.current())
    ssts = [*tree.l0, *(info for run in tree.runs for info in run.ssts)]
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
    node = stage.world.node("somebody")
    await node.run(stage.world.store_for(node).create(name, b"not ours"))
