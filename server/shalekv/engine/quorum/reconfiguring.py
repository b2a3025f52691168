"""Changes of members, as the writer takes part in them (core.quorum.membership).

The first edit of a change is made by whoever asks for it; the writer sees it in the manifest, and
from then on commits by majorities of both sets. When a majority of the next members has its log, it
makes the second edit.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import structlog

from shalekv.clock import Clock
from shalekv.errors import InvalidRequest, StoreError
from shalekv.manifest.fenced import FencedManifest
from shalekv.protocol.manifest import Manifest, WalMode
from shalekv.protocol.membership import Configuration, finish_change
from shalekv.protocol.opening import check_owner

if TYPE_CHECKING:
    from shalekv.write.quorum.log import QuorumLog

log = structlog.get_logger()

LOOK_MS = 100  # at what this process knows of the manifest already: it costs no request


class Reconfiguring:
    """Keeps the members of a log as the manifest has them."""

    def __init__(self, manifest: FencedManifest, quorum_log: QuorumLog, clock: Clock) -> None:
        """Somebody else refreshes `manifest`."""
        self._manifest = manifest
        self._log = quorum_log
        self._clock = clock

    async def run(self) -> None:
        """Look until cancelled. Raises what the manifest says of this writer: `Fenced`."""
        while True:
            manifest = self._manifest.current
            # The members that another writer has may have promised nothing to anybody yet: they
            # would take what nobody may commit any more.
            check_owner(manifest, self._manifest.own)
            if manifest.wal_mode is WalMode.QUORUM:
                self._log.reconfigure(Configuration.of(manifest))
            if self._log.ledger.leader.may_finish_change:
                await self._finish(self._log.ledger.leader.configuration)
            await self._clock.sleep_ms(LOOK_MS)

    async def _finish(self, joint: Configuration) -> None:
        """The second edit, unless the change was cancelled meanwhile."""

        def has_landed(manifest: Manifest) -> bool:
            members = tuple(map(str, joint.next))
            return manifest.wal_generation > joint.generation and manifest.wal_members == members

        edit = partial(finish_change, own=self._manifest.own, generation=joint.generation)
        try:
            manifest = await self._manifest.edit(edit, has_landed)
        except InvalidRequest as error:  # the next look sees what became of it
            log.warning("a change of members was not finished", problem=str(error))
            return
        except StoreError as error:
            log.warning("a change of members could not be finished", error=str(error))
            return
        self._log.reconfigure(Configuration.of(manifest))
