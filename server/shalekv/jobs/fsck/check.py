"""The check of a database: which parts it has, in which order, and what is looked at twice.

Servers, compactors and collectors may be at work meanwhile. Objects never change, so what is found
in one counts; only what is missing, or not named, may have been needed or made in between. That is
decided at the end, by manifests that are read anew.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from itertools import pairwise

from shalekv.core.audit.levels import level_findings
from shalekv.core.audit.manifests import manifest_findings, succession_findings
from shalekv.engine.fsck.active import Active, NamedSst, read_active
from shalekv.engine.fsck.log import check_log
from shalekv.engine.fsck.order import check_order
from shalekv.engine.fsck.origins import check_origins
from shalekv.engine.fsck.progress import CheckProgress, Scope
from shalekv.engine.levels.origins import Origins
from shalekv.errors import ObjectNotFound
from shalekv.format.names import (
    is_uuid7,
    level_name,
    manifest_name,
    parse_level_name,
    parse_wal_name,
)
from shalekv.jobs.fsck.levels import check_ssts, list_levels, orphans
from shalekv.protocol.audit import Finding, FindingKind
from shalekv.protocol.manifest import Manifest
from shalekv.store.cas import CasStore

DEFAULT_PARALLEL = 4


class Fsck:
    """One check of the database in `store`, which is only read."""

    def __init__(
        self, store: CasStore, *, parallel: int = DEFAULT_PARALLEL, is_deep: bool = False
    ) -> None:
        """`parallel` objects are looked at together, of each at most a few megabytes at once.

        With `is_deep` all keys of the current tree are merged, too.
        """
        self._scope = Scope(store, parallel)
        self._is_deep = is_deep

    @property
    def progress(self) -> CheckProgress:
        """How far it has come; it changes while `findings` runs."""
        return self._scope.progress

    async def findings(self) -> AsyncIterator[Finding]:
        """Everything that is wrong, as it is found. Raises `DatabaseNotFound`.

        After the first finding it goes on, as far as what is found can still be read.
        """
        try:
            async for finding in self._findings():
                yield finding
        finally:
            await self._scope.origins.close()

    async def _findings(self) -> AsyncIterator[Finding]:
        scope = self._scope
        active = await read_active(scope.store)
        scope.progress.manifests = len(active.manifests)
        scope.progress.size_bytes = active.sizes_bytes
        for finding in _about_manifests(active):
            if finding.kind is FindingKind.MISSING:
                scope.missing.append(finding.name)
            else:
                yield finding
        current = active.current
        if current is None:
            return  # nothing says what must be there
        scope.origins = Origins(scope.store, current.database_id)
        for manifest in active.manifests.values():
            scope.origins.learn(manifest.origins)
        listed: dict[str, int] = {}
        async for finding in self._in_objects(active, current, listed):
            yield finding
        async for finding in self._at_the_end(active, listed):
            yield finding

    async def _at_the_end(self, active: Active, listed: dict[str, int]) -> AsyncIterator[Finding]:
        """What only manifests can tell that are read after the objects."""
        scope = self._scope
        again = await read_active(scope.store)
        async for finding in _missing(scope, again):
            yield finding
        async for finding in check_origins(scope, again):
            yield finding
        if active.is_complete and again.is_complete:
            still_there = await list_levels(scope)
            for finding in orphans(again, listed):
                if finding.name in still_there:
                    yield finding

    async def _in_objects(
        self, active: Active, current: Manifest, listed: dict[str, int]
    ) -> AsyncIterator[Finding]:
        """What is wrong in the WAL and the levels; `listed` gets what is in the latter."""
        scope = self._scope
        async for finding in check_log(scope, active, current):
            yield finding
        listed.update(await list_levels(scope))
        async for finding in check_ssts(scope, active, listed):
            yield finding
        if self._is_deep:
            async for finding in check_order(scope, current):
                yield finding


def _about_manifests(active: Active) -> list[Finding]:
    findings = [*active.findings]
    ordered = [active.manifests[manifest_id] for manifest_id in sorted(active.manifests)]
    for manifest in ordered:
        name = manifest_name(manifest.manifest_id)
        findings += manifest_findings(name, manifest)
        findings += level_findings(name, manifest)
    for older, newer in pairwise(ordered):
        findings += succession_findings(manifest_name(newer.manifest_id), older, newer)
    return findings


async def _missing(scope: Scope, again: Active) -> AsyncIterator[Finding]:
    """Of the objects that were not there, those that are needed and not there now."""
    problems = {f.name: f.problem for f in again.findings if f.kind is FindingKind.MISSING}
    named = {level_name(sst.info.id): sst.by for sst in _needed(scope, again)}
    for name in sorted({*scope.missing}):
        wal_id = parse_wal_name(name)
        if wal_id is not None and wal_id >= again.first_wal_id:
            problems[name] = "is missing although it was written"
        if parse_level_name(name) is not None and name in named:
            problems[name] = f"is missing, and {named[name]} names it"
        if name not in problems:
            continue
        sst_id = parse_level_name(name)
        place = None if sst_id is None else scope.origins.locate(sst_id)
        if await _is_gone(scope.store if place is None else place.store, name):
            yield Finding(scope.told(name), FindingKind.MISSING, problems[name])


def _needed(scope: Scope, active: Active) -> Iterator[NamedSst]:
    """All that have names but files of loads without a record: those may not be written yet."""
    for sst in active.ssts():
        if is_uuid7(sst.info.id) and (sst.pending is None or sst.pending in scope.recorded):
            yield sst


async def _is_gone(store: CasStore, name: str) -> bool:
    try:
        await store.reads.head(name)
    except ObjectNotFound:
        return True
    return False
