"""The data folder of a safekeeper: one process at a time, and a folder for each member.

lock                             locked by the process that uses the folder
<database id, 32 hex digits>     the log of a member (see `shalekv.store.safekeeper_log.log`)
<database id>.quarantined-<n>    a log whose promise could not be read
<database id>.retired-<n>        a log of a former member, which no manifest names any more,
with records that were not archived
<database id>.new, .removed      half created, half deleted: the next start deletes them
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
from dataclasses import replace
from itertools import count
from pathlib import Path

from shalekv.errors import CorruptObject, LogFull, StoreRefused, UnsupportedVersion, WrongObject
from shalekv.format.quorum.member_files import Control, MemberIdentity, Synced
from shalekv.protocol.quorum.acceptor import AcceptorState
from shalekv.protocol.quorum_records import LogHealth
from shalekv.store.files import REAL_FILE_SYSTEM, DurableFiles, FileLock, FileSystem
from shalekv.store.safekeeper_log.log import MemberLog, clear
from shalekv.store.safekeeper_log.scan import SPARE_SUFFIX, Scanned, scan
from shalekv.store.safekeeper_log.slots import ControlFile, SyncedFile

SEGMENT_BYTES = 64 << 20
LOCK_NAME = "lock"
NEW_SUFFIX = ".new"
REMOVED_SUFFIX = ".removed"
_MEMBER = re.compile(r"[0-9a-f]{32}")


class DataFolder:
    """The members of one node. Everything blocks."""

    def __init__(self, path: Path, lock: FileLock, files: DurableFiles, segment_bytes: int) -> None:
        """Use `open` instead."""
        self.path = path
        self.files = files
        self._lock = lock
        self._segment_bytes = segment_bytes

    @classmethod
    def open(
        cls,
        path: Path,
        *,
        segment_bytes: int = SEGMENT_BYTES,
        free_bytes_min: int = 0,
        filesystem: FileSystem = REAL_FILE_SYSTEM,
    ) -> DataFolder:
        """Lock the folder, an absolute path; create it if it is missing.

        No segment is allocated that would leave less than `free_bytes_min` of the disk free.

        Raises `StoreRefused` when another process has it, or it cannot be created or written.
        """
        files = DurableFiles(filesystem, str(path), free_bytes_min=free_bytes_min)
        try:
            files.ensure_folder(path)
            lock = filesystem.try_lock(path / LOCK_NAME)
        except OSError as error:
            problem = _problem(path, error)
            raise StoreRefused(str(path), "open", "data folder", problem) from error
        if lock is None:
            raise StoreRefused(str(path), "lock", LOCK_NAME, "another safekeeper uses this folder")
        return cls(path, lock, files, segment_bytes)

    def open_logs(self) -> tuple[list[MemberLog], list[Path]]:
        """Open the logs of all members; also return the folders that were quarantined now.

        A folder is quarantined when the promise of its member cannot be read: the node then has no
        such member. Raises `StoreRefused` when a log belongs to another user.
        """
        logs: list[MemberLog] = []
        quarantined: list[Path] = []
        for name in self.files.list_folders(self.path):
            folder = self.path / name
            is_leftover = name.endswith((NEW_SUFFIX, REMOVED_SUFFIX))
            is_member = _MEMBER.fullmatch(name) is not None
            if (is_leftover or is_member) and not self.files.filesystem.may_write(folder):
                error = PermissionError(errno.EACCES, os.strerror(errno.EACCES))
                raise StoreRefused(str(self.path), "open", name, _problem(folder, error))
            if is_leftover:
                delete_folder(self.files, folder)
            if not is_member:
                continue
            try:
                logs.append(self._open(folder))
            except UnsupportedVersion:
                raise
            except CorruptObject:
                quarantined.append(self._rename_aside(folder, "quarantined"))
        return logs, quarantined

    def create(self, identity: MemberIdentity) -> MemberLog:
        """Create a member with an empty log, durably.

        Raises `FileExistsError` when the database has a member here, and `LogFull`.
        """
        folder = self.path / identity.database_id.hex()
        return create_log(self.files, folder, identity, segment_bytes=self._segment_bytes)

    def remove(self, log: MemberLog) -> None:
        """Delete a member and its log."""
        log.close()
        removed = log.folder.with_name(log.folder.name + REMOVED_SUFFIX)
        delete_folder(self.files, removed)
        self.files.rename(log.folder, removed)
        self.files.sync_folder(self.path)
        delete_folder(self.files, removed)

    def retire(self, log: MemberLog) -> Path:
        """Retire the log of a former member, keeping its records; return its new path."""
        log.close()
        return self._rename_aside(log.folder, "retired")

    def close(self) -> None:
        """Unlock the folder. REQUIRES: the logs were closed before."""
        self._lock.release()

    def _open(self, folder: Path) -> MemberLog:
        log = open_log(self.files, folder, segment_bytes=self._segment_bytes)
        if log.identity.database_id.hex() != folder.name:
            log.close()
            raise WrongObject(str(folder), 0, "the log of another database")
        return log

    def _rename_aside(self, folder: Path, why: str) -> Path:
        """Rename a folder to the first free name with the suffix `why` and a number."""
        taken = set(self.files.list_folders(self.path))
        names = (f"{folder.name}.{why}-{number}" for number in count(1))
        name = next(name for name in names if name not in taken)
        self.files.rename(folder, self.path / name)
        self.files.sync_folder(self.path)
        return self.path / name


def _problem(path: Path, error: OSError) -> str:
    """Say why the folder cannot be used, and what to do about it."""
    uid, gid = os.geteuid(), os.getegid()
    match error.errno:
        case errno.EACCES | errno.EPERM if path.exists():
            advice = f"make this user its owner (chown -R {uid}:{gid} {path})"
        case errno.EACCES | errno.EPERM:
            advice = f"create it for this user (install -d -o {uid} -g {gid} {path})"
        case errno.ENOTDIR:
            advice = "there is a file where the folder must be"
        case errno.EROFS:
            advice = "mount a writable volume there, or choose another folder with --data"
        case errno.ENOSPC | errno.EDQUOT:
            advice = "make room on this disk, or choose another folder with --data"
        case _:
            advice = "choose another folder with --data"
    if error.errno in {errno.EACCES, errno.EPERM}:
        return f"user {uid} cannot write it: {error.strerror}: {advice}"
    return f"it cannot be written: {error.strerror}: {advice}"


def create_log(
    files: DurableFiles, folder: Path, identity: MemberIdentity, *, segment_bytes: int
) -> MemberLog:
    """Create an empty log, durably. Blocks.

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


def open_log(files: DurableFiles, folder: Path, *, segment_bytes: int) -> MemberLog:
    """Open an existing log. Blocks. Raises `CorruptObject` when its promise cannot be read.

    If records were lost that may have been acknowledged, the log is marked as damaged, durably, and
    its files are left as they are until it is reset. If not, the rest of an incomplete write is
    cut.
    """
    files.sync_folder(folder)  # a file that an earlier process deleted must not come back
    control = ControlFile.open(files, folder)
    synced = SyncedFile.open(files, folder)
    scanned = scan(files, folder, control.control, synced.synced)
    if scanned.problem is not None and control.control.health is not LogHealth.DAMAGED:
        control.save(replace(control.control, health=LogHealth.DAMAGED))
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
    _cut_leftovers(files, folder, scanned)
    log.continue_segment()
    log.write_bound()
    return log


def delete_folder(files: DurableFiles, folder: Path) -> None:
    """Delete a folder of files, if it exists."""
    try:
        found = files.list_files(folder)
    except FileNotFoundError:
        return
    for entry in found:
        files.unlink(folder / entry.name)
    files.rmdir(folder)


def _cut_leftovers(files: DurableFiles, folder: Path, scanned: Scanned) -> None:
    """Durably delete everything that is not part of the log: files first, then bytes."""
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
