"""The manifest as its compactor sees it: every read and every edit first checks who that is."""

from __future__ import annotations

import asyncio

from shalekv.protocol.compaction.publish import CompactorId, check_compactor
from shalekv.protocol.manifest import Manifest
from shalekv.store.manifests import Edit, Landed, StoredManifest


class CompactedManifest:
    """A `StoredManifest` that raises `Superseded` as soon as there is another compactor."""

    def __init__(self, stored: StoredManifest, own: CompactorId) -> None:
        """`own` has won its epoch in this manifest."""
        self._stored = stored
        self._editing = asyncio.Lock()  # edits of one process need not conflict
        self.own = own

    @property
    def current(self) -> Manifest:
        """The newest manifest that was seen."""
        return self._stored.current

    async def refresh(self) -> Manifest:
        """The newest manifest, by a list that is sent now. Raises `Superseded`."""
        manifest = await self._stored.refresh()
        check_compactor(manifest, self.own)
        return manifest

    async def edit(self, edit: Edit, landed: Landed) -> Manifest:
        """As `StoredManifest.edit`, on manifests whose compactor is this. Raises `Superseded`."""

        def own_edit(manifest: Manifest) -> Manifest:
            check_compactor(manifest, self.own)
            return edit(manifest)

        async with self._editing:
            manifest = await self._stored.edit(own_edit, landed)
        check_compactor(manifest, self.own)
        return manifest
