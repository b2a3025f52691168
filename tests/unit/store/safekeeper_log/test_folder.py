"""A data folder belongs to one process, which finds its members there."""

from __future__ import annotations

import errno
import os
from dataclasses import replace
from pathlib import Path

import pytest

from shalekv.errors import StoreRefused, UnsupportedVersion
from shalekv.format.coding import crc32c
from shalekv.protocol.quorum_records import LogEnd
from shalekv.store.safekeeper_log.folder import DataFolder
from tests.kit.disks.failing import FailingFileSystem
from tests.kit.disks.member_logs import (
    IDENTITY,
    SEGMENT_BYTES,
    held,
    payloads,
    records_after,
    write,
)

OTHER = replace(IDENTITY, database_id=b"e" * 16, member_id=b"o" * 16)
RECORDS = records_after(LogEnd(), payloads(5))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """The path of a folder that does not exist yet."""
    return tmp_path / "srv" / "safekeeper"


def opened(path: Path) -> DataFolder:
    return DataFolder.open(path, segment_bytes=SEGMENT_BYTES)


def test_members_are_found(path: Path) -> None:
    """Each database has one log; a second one is refused."""
    folder = opened(path)
    assert folder.open_logs() == ([], [])
    for identity in (IDENTITY, OTHER):
        log = folder.create(identity)
        write(log, RECORDS)
        log.close()
    with pytest.raises(FileExistsError):
        folder.create(IDENTITY)
    logs, set_aside = folder.open_logs()
    assert [log.identity for log in logs] == [IDENTITY, OTHER]
    assert all(held(log) == list(RECORDS) for log in logs)
    assert set_aside == []


@pytest.mark.parametrize(
    ("operation", "number", "advice"),
    [
        ("try_lock", errno.EACCES, "make this user its owner (chown -R {owner} {path})"),
        ("mkdir", errno.EACCES, "create it for this user (install -d -o {uid} -g {gid} {path})"),
        ("try_lock", errno.EROFS, "mount a writable volume there, or choose another folder"),
        ("mkdir", errno.ENOSPC, "make room on this disk, or choose another folder with --data"),
    ],
)
def test_a_folder_that_cannot_be_written(
    path: Path, operation: str, number: int, advice: str
) -> None:
    """The error names the folder, the user and what to do, in one line."""
    disk = FailingFileSystem()
    disk.fail(operation, number)
    with pytest.raises(StoreRefused) as raised:
        DataFolder.open(path, filesystem=disk)
    uid, gid = os.geteuid(), os.getegid()
    problem = advice.format(owner=f"{uid}:{gid}", uid=uid, gid=gid, path=path)
    is_about_user = number in {errno.EACCES, errno.EPERM}
    who = f"user {uid} cannot write it" if is_about_user else "it cannot be written"
    line = f"{path}: open data folder: {who}: {os.strerror(number)}: {problem}"
    assert str(raised.value).startswith(line)


def test_a_log_of_another_user(path: Path) -> None:
    """A log that this user cannot write is refused, and nothing is changed."""
    disk = FailingFileSystem()
    folder = DataFolder.open(path, segment_bytes=SEGMENT_BYTES, filesystem=disk)
    folder.create(IDENTITY).close()
    log_path = path / IDENTITY.database_id.hex()
    disk.fail("may_write", errno.EACCES)
    with pytest.raises(StoreRefused, match=f"make this user its owner .*{log_path}"):
        folder.open_logs()
    disk.clear_failures()
    assert [log.identity for log in folder.open_logs()[0]] == [IDENTITY]


def test_two_cannot_share_it(path: Path) -> None:
    """While one process has the folder open, it is refused to others."""
    folder = opened(path)
    with pytest.raises(StoreRefused):
        opened(path)
    folder.close()
    opened(path).close()


def test_a_folder_that_cannot_be_made_is_reported(path: Path) -> None:
    """A file in the place of the folder, or a missing permission, is an error that names the
    folder.
    """
    path.parent.mkdir()
    path.write_bytes(b"")
    with pytest.raises(
        StoreRefused, match=r"safekeeper: .*cannot be written: Not a directory: there is a file"
    ):
        opened(path)


def test_a_removed_member_is_gone(path: Path) -> None:
    """A removed member is not found again, and the database may have another one."""
    folder = opened(path)
    folder.remove(folder.create(IDENTITY))
    assert folder.open_logs() == ([], [])
    again = replace(IDENTITY, member_id=b"a" * 16)
    log = folder.create(again)
    assert log.identity == again
    assert sorted(p.name for p in path.iterdir()) == [b"d".hex() * 16, "lock"]


def test_what_was_half_done_is_cleared(path: Path) -> None:
    """Members that were half created or half removed are deleted at the next start."""
    folder = opened(path)
    for name in ("64" * 16 + ".new", "65" * 16 + ".removed"):
        (path / name).mkdir()
        (path / name / "control").write_bytes(b"half")
    assert folder.open_logs() == ([], [])
    assert [p.name for p in path.iterdir()] == ["lock"]


def test_a_member_that_nobody_knows_is_set_aside(path: Path) -> None:
    """Without its control file a member is quarantined as a whole, and the node no longer
    has it.
    """
    folder = opened(path)
    folder.create(OTHER).close()
    for number in (1, 2):
        log = folder.create(IDENTITY)
        write(log, RECORDS)
        log.close()
        (log.folder / "control").write_bytes(b"x" * 8192)
        logs, set_aside = folder.open_logs()
        assert [found.identity for found in logs] == [OTHER]
        assert set_aside == [path / f"{log.folder.name}.quarantined-{number}"]
        assert sorted(p.suffix for p in set_aside[0].iterdir()) == ["", "", ".log", ".log"]
        logs[0].close()


def test_a_member_in_the_wrong_place_is_set_aside(path: Path) -> None:
    """A folder that was copied under the name of another database is not used as its log."""
    folder = opened(path)
    log = folder.create(IDENTITY)
    log.close()
    log.folder.rename(path / OTHER.database_id.hex())
    assert folder.open_logs() == ([], [path / f"{OTHER.database_id.hex()}.quarantined-1"])


def test_a_later_version_is_left_alone(path: Path) -> None:
    """Files of a later version stop the start: they are neither quarantined nor read."""
    folder = opened(path)
    log = folder.create(IDENTITY)
    log.close()
    slot = b"SKC9".ljust(4092, b"?")
    slot += crc32c(slot).to_bytes(4, "little")
    (log.folder / "control").write_bytes(slot * 2)
    with pytest.raises(UnsupportedVersion):
        folder.open_logs()
    assert log.folder.exists()
