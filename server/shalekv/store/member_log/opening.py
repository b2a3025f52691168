"""Makes the log of a member, and finds it again when a process starts."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from pathlib import Path

from shalekv.core.quorum.messages import Health
from shalekv.errors import LogFull
from shalekv.format.member_files import Control, MemberIdentity, Synced
from shalekv.protocol.acceptor import AcceptorState
from shalekv.store.safekeeper_log.files import Files
from shalekv.store.safekeeper_log.log import MemberLog, clear
from shalekv.store.safekeeper_log.scan import SPARE_SUFFIX, Scanned, scan
from shalekv.store.safekeeper_log.slots import ControlFile, SyncedFile

NEW_SUFFIX = ".new"


def create_log(
    files: Files, folder: Path, identity: MemberIdentity, *, segment_bytes: int
) -> MemberLog:
    """Make an empty log, durably. Blocks.

    Raises `FileExistsError` when there is a folder of this name, and `LogFull`.
    """
    temp_folder = folder.with_name(folder.name + NEW_SUFFIX)
    with contextlib.suppress(FileNotFoundError):
        files.filesystem.stat_folder(folder)
        raise FileExistsError(str(folder))
    delete_folder(files, temp_folder)
    with files.changing("mkdir", temp_folder):
        files.filesystem.mkdir(temp_folder)
    control = Control(identity)
    try:
        ControlFile.create(files, temp_folder, control).close()
        synced = SyncedFile.create(files, temp_folder)
    except LogFull:
        delete_folder(files, temp_folder)
        raise
    synced.lower(Synced(control.generation, 0, 0, 0, 0))
    synced.close()
    files.sync_folder(temp_folder)
    files.rename(temp_folder, folder)
    files.sync_folder(folder.parent)
    return open_log(files, folder, segment_bytes=segment_bytes)


def open_log(files: Files, folder: Path, *, segment_bytes: int) -> MemberLog:
    """Find a log again. Blocks. Raises `CorruptObject` when nobody knows what it has promised.

    If records were lost that may have been acknowledged, it is damaged, durably, and its files are
    left as they are until it is reset. If not, what was not written to its end is cut.
    """
    files.sync_folder(folder)  # a file that an earlier process deleted must not come back
    control = ControlFile.open(files, folder)
    synced = SyncedFile.open(files, folder)
    scanned = scan(files, folder, control.control, synced.synced)
    if scanned.problem is not None and control.control.health is not Health.DAMAGED:
        control.save(replace(control.control, health=Health.DAMAGED))
    state = _recovered(control.control, synced.synced, scanned)
    log = MemberLog(
        *(files, folder, control, synced, scanned.index, state, segment_bytes),
        problem=scanned.problem,
    )
    if scanned.problem is not None:
        for path in scanned.leftovers:
            if path.name.endswith(SPARE_SUFFIX):
                files.unlink(path)
        return log
    _mend(files, folder, scanned)
    log.continue_segment()
    log.note_bound()
    return log


def delete_folder(files: Files, folder: Path) -> None:
    """Delete a folder of files, if it is there."""
    try:
        found = files.list_files(folder)
    except FileNotFoundError:
        return
    for entry in found:
        files.unlink(folder / entry.name)
    files.rmdir(folder)


def _mend(files: Files, folder: Path, scanned: Scanned) -> None:
    """Cut durably what is not part of the log: files first, then bytes."""
    for path in scanned.leftovers:
        files.unlink(path)
    if scanned.leftovers:
        files.sync_folder(folder)
    if scanned.index.segments:
        segment = scanned.index.segments[-1]
        file = files.open(segment.path)
        clear(file, segment.end, segment.size_bytes)
        file.sync()
        file.close()


def _recovered(control: Control, synced: Synced | None, scanned: Scanned) -> AcceptorState:
    committed_lsn = max(control.committed_lsn, control.base.lsn)
    if synced is not None and synced.generation == control.generation:
        committed_lsn = max(committed_lsn, synced.committed_lsn)
    return AcceptorState(
        member_id=control.identity.member_id,
        promise=control.promise,
        log=scanned.shape,
        committed_lsn=min(committed_lsn, scanned.shape.last.lsn),
        health=control.health,
    )
