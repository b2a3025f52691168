"""Whether the clones for which a database keeps SSTs are still there.

A pin is a snapshot that never expires (`protocol.origins`). The collector of the clone removes it,
and so does `jobs.drop`; if the objects of the clone were deleted in another way, it stays for ever.
Its name says where the clone was made.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass

from shalekv.errors import DatabaseNotFound, ShaleError
from shalekv.protocol.manifest import Manifest, Snapshot
from shalekv.protocol.origins import clone_of_pin, is_pin
from shalekv.read.origins import Origins
from shalekv.store.cas import CasStore
from shalekv.store.manifests import StoredManifest


class CloneState(enum.StrEnum):
    """Whether a clone needs its pin."""

    NEEDED = "needed"
    GONE = "gone"
    UNKNOWN = "not known"


@dataclass(frozen=True, slots=True)
class CheckedPin:
    """A pin, and what is known of its clone; `remark` says why, in a sentence without an end."""

    snapshot: Snapshot
    state: CloneState
    remark: str


async def check_clones(store: CasStore, manifest: Manifest) -> Sequence[CheckedPin]:
    """Look for the clone of each pin in the manifest. A database without pins costs no request."""
    pins = [each for each in manifest.snapshots if is_pin(each)]
    origins = Origins(store, manifest.database_id)
    try:
        return [CheckedPin(pin, *await _state(origins, pin)) for pin in pins]
    finally:
        await origins.close()


def removal_command(url: str, pin: Snapshot) -> str:
    """Return the command that removes a pin of the database at this URL."""
    return f"shalekv snapshot delete {pin.id.hex()} --url {url} --force"


async def _state(origins: Origins, pin: Snapshot) -> tuple[CloneState, str]:
    clone = clone_of_pin(pin.name)
    if clone is None or not clone.url:
        return CloneState.UNKNOWN, "the pin does not say where its clone is"
    try:
        # A clone that is being deleted needs its pin until `jobs.drop` has removed it.
        stored = StoredManifest(origins.store_at(clone.url), even_dropped=True)
        found = await stored.refresh()
    except DatabaseNotFound:
        return CloneState.GONE, f"there is no database at {clone.url}"
    except ShaleError as error:
        return CloneState.UNKNOWN, f"{clone.url} cannot be read: {error}"
    if found.database_id != clone.database_id:
        return CloneState.GONE, f"there is another database at {clone.url}"
    # An origin stays in the manifest until the collector of the clone has removed the pin.
    if all(origin.snapshot_id != pin.id for origin in found.origins):
        return CloneState.GONE, f"the database at {clone.url} shares nothing any more"
    return CloneState.NEEDED, f"{clone.url} reads SSTs of it"
