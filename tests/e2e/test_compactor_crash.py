"""Compactors that are killed at every request that they send to the store."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from random import Random, SystemRandom

import pytest

from shalekv.clock import LoopClock
from shalekv.core.entry import Entry
from shalekv.core.manifest import Manifest
from shalekv.core.tree import Tree
from shalekv.format.names import parse_level_name
from shalekv.manifest.stored import StoredManifest
from shalekv.runtime import Runtime
from shalekv.settings import StoreSettings
from shalekv.store.cas import CasStore
from shalekv.store.local import LocalStore
from tests.kit.engine.compaction import Trial, random_entry, record
from tests.kit.engine.naive_merge import Answer, NaiveTree, answers
from tests.kit.inline_runtime import InlineWorkers

KEYS = [b"key%04d" % n for n in range(300)]
SLOTS = 4


class Crashing:
    """The process that forks compactors and kills them."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.e2e.crashing_compactor"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(self, folder: Path, fatal: int = 0, moment: str = "before") -> str:
        """How a compactor of the database in `folder` ended."""
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        stdin.write(f"{folder} {fatal} {moment}\n")
        stdin.flush()
        return stdout.readline().strip()

    def close(self) -> None:
        """End it."""
        self._process.communicate()


class Folder:
    """A database on disk."""

    def __init__(self, path: Path) -> None:
        runtime = Runtime(LoopClock(), SystemRandom(), InlineWorkers())
        self.path = path
        self.store = LocalStore(path, runtime)
        self._stored = StoredManifest(CasStore(self.store, runtime, StoreSettings()))

    async def manifest(self) -> Manifest:
        """The current one."""
        return await self._stored.refresh()

    async def orphans(self, manifest: Manifest) -> set[bytes]:
        """SSTs of the levels that the manifest does not name."""
        stored = {parse_level_name(info.name) async for info in self.store.list("levels/")}
        return {sst_id for sst_id in stored if sst_id} - {e.id for e in manifest.leveled_ssts}


async def template(path: Path) -> tuple[list[list[Entry]], dict[bytes, Answer]]:
    """A database that was written to, and never compacted; its slots, and what its keys hold."""
    trial, random = await Trial.begun(), Random(5)
    for slot in range(SLOTS):
        commits = [[random_entry(random, KEYS, trial.logical_time_ms)] for _ in range(100)]
        blob = random_entry(random, KEYS, 0)._replace(value=random.randbytes(60_000))
        commits += [[blob]] if blob.kind == 1 else []
        records = [record(b"r%d" % slot, trial.logical_time_ms + 10**9)]
        await trial.write(*commits, records=records)
    await trial.save(path)
    entries = [entry for slot in trial.written for entry in slot]
    return trial.written, answers(entries, KEYS, trial.logical_time_ms)


async def check(folder: Folder, slots: list[list[Entry]]) -> Manifest:
    """The levels hold exactly what stands in the slots up to c."""
    manifest = await folder.manifest()
    naive = await NaiveTree.read(folder.store, manifest)
    compacted = [e for slot in slots[: manifest.first_uncompacted_wal_id] for e in slot]
    now_ms = manifest.logical_time_ms
    assert naive.answers(KEYS, now_ms) == answers(compacted, KEYS, now_ms)
    return manifest


@pytest.mark.parametrize("moment", ["before", "after"])
async def test_killed_at_any_request_it_leaves_a_right_database(
    tmp_path: Path, moment: str
) -> None:
    """After kill -9 at each request, before it is sent or before it is answered, the levels are
    exactly the effect of the slots up to c, and the next compactor goes on to the same end.
    """
    slots, expected = await template(tmp_path / "template")
    crashing = Crashing()
    try:
        shutil.copytree(tmp_path / "template", tmp_path / "whole")
        requests = int(crashing.run(tmp_path / "whole"))
        whole = await check(Folder(tmp_path / "whole"), slots)
        assert whole.first_uncompacted_wal_id == SLOTS
        assert Tree.of(whole).runs
        orphans = 0
        for fatal in range(1, requests + 1):
            folder = Folder(tmp_path / f"killed_at_{fatal}")
            shutil.copytree(tmp_path / "template", folder.path)
            ended = crashing.run(folder.path, fatal, moment)
            if ended != "killed":
                # Reads in parallel make a few requests more or less, and not all are answered.
                assert requests - 12 < fatal
                assert ended.isdecimal()
                break
            manifest = await check(folder, slots)
            orphans += bool(await folder.orphans(manifest))
            assert crashing.run(folder.path).isdecimal()
            manifest = await check(folder, slots)
            assert manifest.first_uncompacted_wal_id == SLOTS
            naive = await NaiveTree.read(folder.store, manifest)
            assert naive.answers(KEYS, manifest.logical_time_ms) == expected
            shutil.rmtree(folder.path)
        assert orphans  # or else it never died between writing and publishing
        print(f"\n{requests} requests, {orphans} crashes left SSTs that nobody names")  # noqa: T201
    finally:
        crashing.close()
