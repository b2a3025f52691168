"""Creation of a database: its first manifest, and its safekeepers if it is to have some.

Also checks of an existing database that come before it is opened.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial

from shalekv.errors import DatabaseExists, DatabaseMismatch, DatabaseNotFound, InvalidRequest
from shalekv.protocol.manifest import Manifest, WalMode
from shalekv.protocol.membership import (
    FIRST_GENERATION,
    Configuration,
    check_first_count,
    check_members,
    may_replace_first_members,
    replace_first_members,
)
from shalekv.runtime import Runtime
from shalekv.settings import CLOCK_JUMP_MAX_S, DatabaseSettings, StoreSettings, WalChoice
from shalekv.store.api import ObjectStore
from shalekv.store.cas import CasStore
from shalekv.store.manifests import (
    StoredManifest,
    any_wal_object,
    check_vacant,
    create_first_manifest,
    manifests_lost,
)
from shalekv.write.logical_time import first_time
from shalekv.write.quorum.links import DatabasePlace, Links
from shalekv.write.quorum.membership import REQUEST_ID_BYTES, admit, admit_again, retire

_MODES = {WalChoice.OBJECT_STORE: WalMode.OBJECT_STORE, WalChoice.QUORUM: WalMode.QUORUM}
_NAMES = {mode: choice.value for choice, mode in _MODES.items()}


@dataclass(frozen=True, slots=True)
class Quorum:
    """Safekeepers that are to hold the WAL of a new database, and the connections to them."""

    links: Links
    addresses: Sequence[str]


async def create_database(
    store: ObjectStore,
    runtime: Runtime,
    settings: StoreSettings,
    quorum: Quorum | None = None,
    *,
    clock_jump_max_s: int = CLOCK_JUMP_MAX_S,
) -> None:
    """Write manifest 0 of a new database.

    With a `quorum` each safekeeper creates its log first; if one of them fails, none keeps its log.

    Raises:
        DatabaseExists: there is a manifest, not always the first, which may have been collected.
        IllegalState: there is no manifest but a WAL object, the remains of another database.
        StoreUnfit: a short form of `shalekv store verify`, which comes before the first manifest,
            shows that the store would lose data.
        ImplausibleTime: the clocks of the store and of this machine differ by more than
            `clock_jump_max_s`.
        InvalidRequest: the safekeepers cannot form a quorum.
        QuorumUnavailable: a safekeeper does not answer.
    """
    from shalekv.store.verify.verify import check_fit  # noqa: PLC0415 - 15 modules, to create only

    cas = CasStore(store, runtime, settings)
    await check_vacant(cas)
    remnant = await any_wal_object(cas)
    if remnant is not None:
        # A manifest is created before the log: if another process creates a database now, its
        # manifest is there by this second check.
        await check_vacant(cas)
        raise manifests_lost(cas, remnant)
    # In two-phase mode the transactional store has to answer first: creates are retried for ever.
    await cas.repair()
    await check_fit(store, runtime, settings)
    manifest = Manifest(
        database_id=runtime.random.randbytes(16),
        manifest_id=0,
        write_id=runtime.random.randbytes(16),
        cas_mode=cas.cas_mode,
        logical_time_ms=(await first_time(cas, None, clock_jump_max_s)).store_now_ms,
    )
    if quorum is None:
        await create_first_manifest(cas, manifest)
    else:
        await _create_with_members(cas, manifest, quorum)


async def _create_with_members(cas: CasStore, manifest: Manifest, quorum: Quorum) -> None:
    check_first_count(quorum.addresses)
    place = DatabasePlace(manifest.database_id, cas.url)
    request_id = cas.runtime.random.randbytes(REQUEST_ID_BYTES)
    members = await admit(quorum.links, place, quorum.addresses, request_id, is_new=True)
    check_members(members)
    with_members = replace(
        manifest,
        wal_mode=WalMode.QUORUM,
        wal_generation=FIRST_GENERATION,
        wal_members=tuple(map(str, members)),
    )
    try:
        await create_first_manifest(cas, with_members)
    except DatabaseExists:  # another process was faster: nobody needs the new logs
        await retire(quorum.links, manifest.database_id, members)
        raise
    await _keep_present_members(cas, with_members, quorum.links, request_id)


async def complete_creation(cas: CasStore, links: Links) -> None:
    """Finish a creation whose process ended early, if no writer has opened the database since.

    Raises `DatabaseNotFound` and `StoreError`.
    """
    manifest = await StoredManifest(cas).refresh()
    if may_replace_first_members(manifest):
        request_id = cas.runtime.random.randbytes(REQUEST_ID_BYTES)
        with suppress(InvalidRequest):  # another process has finished it, or opened the database
            await _keep_present_members(cas, manifest, links, request_id)


async def _keep_present_members(
    cas: CasStore, manifest: Manifest, links: Links, request_id: bytes
) -> None:
    """Admit the members of a new database again, and correct their ids in the manifest.

    A safekeeper deletes a new log if no manifest has named it for long. Its next log has another
    member id.
    """
    place = DatabasePlace(manifest.database_id, cas.url)
    members = Configuration.of(manifest).members
    present = await admit_again(links, place, members, request_id)
    if present != members:
        texts = tuple(map(str, present))
        edit = partial(replace_first_members, members=present)
        await StoredManifest(cas).edit(edit, lambda m: m.wal_members == texts)


async def writer_epoch(store: ObjectStore, runtime: Runtime, settings: StoreSettings) -> int:
    """Return the epoch of the last writer that opened the database.

    0 if none has, or if there is no database.
    """
    try:
        return (await StoredManifest(CasStore(store, runtime, settings)).refresh()).writer_epoch
    except DatabaseNotFound:
        return 0


async def check_wal_mode(
    store: ObjectStore, runtime: Runtime, settings: StoreSettings, wanted: DatabaseSettings
) -> None:
    """Raise `DatabaseMismatch` if the WAL of a database is not where `wanted` says.

    The manifest decides where it is. Settings that are not given are not compared, and those that
    are given have no other effect.
    """
    if wanted.wal is None:
        return
    manifest = await StoredManifest(CasStore(store, runtime, settings)).refresh()
    if manifest.wal_mode is not _MODES[wanted.wal]:
        raise DatabaseMismatch(
            f"this database has its WAL in mode {_NAMES[manifest.wal_mode]}, not in mode "
            f"{wanted.wal.value}. Leave --wal out, or see `shalekv safekeeper switch --help`"
        )
    addresses = {*wanted.safekeeper_addresses}
    if not addresses:
        return
    configuration = Configuration.of(manifest)
    sets = [{member.address for member in configuration.members}]
    sets.append({member.address for member in configuration.next})
    if addresses not in sets:
        raise DatabaseMismatch(
            f"the safekeepers of this database are {','.join(sorted(sets[0]))}, not "
            f"{','.join(sorted(addresses))}. Leave --safekeepers out: the manifest names them; see "
            "`shalekv safekeeper --help` for changing them"
        )
