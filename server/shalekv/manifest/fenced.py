"""The manifest as its writer sees it: every read and every edit first checks who owns it.

Fencing is a wrapper around the stored manifest, so that no caller can forget the check.
"""

from __future__ import annotations

from shalekv.protocol.manifest import Manifest
from shalekv.protocol.opening import WriterId, check_owner
from shalekv.store.manifests import Edit, Landed, StoredManifest


class FencedManifest:
    """A `StoredManifest` that raises `Fenced` as soon as another writer owns it."""

    def __init__(self, stored: StoredManifest, own: WriterId) -> None:
        """`own` has won its epoch in this manifest."""
        self._stored = stored
        self.own = own

    @property
    def current(self) -> Manifest:
        """The newest manifest that was seen; this writer owned it."""
        return self._stored.current

    async def refresh(self) -> Manifest:
        """The newest manifest, by a list that is sent now. Raises `Fenced`."""
        manifest = await self._stored.refresh()
        check_owner(manifest, self.own)
        return manifest

    async def edit(self, edit: Edit, landed: Landed) -> Manifest:
        """As `StoredManifest.edit`, on manifests that this writer owns. Raises `Fenced`."""

        def owned_edit(manifest: Manifest) -> Manifest:
            check_owner(manifest, self.own)
            return edit(manifest)

        manifest = await self._stored.edit(owned_edit, landed)
        check_owner(manifest, self.own)
        return manifest
