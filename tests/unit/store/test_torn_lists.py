"""Lists of a folder that others change while the listing process is stopped."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable
from pathlib import Path

import pytest

from shalekv.store.files import FileSystem, FolderEntry
from shalekv.store.local import TIME_STEP_MS, LocalStore
from tests.kit.inline_runtime import finish, gathered, inline_runtime

STAYING = [f"{number:03}{'x' * 200}" for number in range(500)]  # the kernel returns 140 a call
OLD = [f"old{number:02}" for number in range(40)]
NEW = [f"new{number:02}" for number in range(40)]


class StopsInside(FileSystem):
    """Stops its process (SIGSTOP) once, after the kernel has returned the first piece of a
    folder. Its time stands still, so that no folder becomes older while a test runs.
    """

    def __init__(self, *, then_stop: bool) -> None:
        self.then_stop = then_stop
        self.scans = 0
        self._now_ms = super().now_ms()

    def now_ms(self) -> int:
        return self._now_ms

    def list_folder(self, path: Path) -> list[FolderEntry]:
        self.scans += 1
        with os.scandir(path) as entries:
            names = [next(entries).name]
            if self.then_stop:
                self.then_stop = False
                os.kill(os.getpid(), signal.SIGSTOP)
            names += [entry.name for entry in entries]
        return [FolderEntry(name, is_folder=False) for name in names]


def placed(folder: Path, names: Iterable[str]) -> list[str]:
    """The names of created files, in the order in which the kernel lists them."""
    for name in names:
        (folder / name).touch()
    return [entry.name for entry in os.scandir(folder) if entry.name in names]


def listed(root: Path, filesystem: FileSystem) -> list[str]:
    store = LocalStore(root, inline_runtime(), filesystem=filesystem)
    return [info.name.removeprefix("wal/") for info in finish(gathered(store.list("wal/")))]


def test_a_process_that_is_stopped_inside_a_list_misses_no_successor(tmp_path: Path) -> None:
    """The object that the list would read last is deleted while the process is stopped, and its
    successor appears in a piece that was already read: the list does not miss both.
    """
    folder = tmp_path / "wal"
    folder.mkdir()
    placed(folder, OLD)
    placed(folder, STAYING)
    new, old = placed(folder, NEW)[0], placed(folder, OLD)[-1]
    for name in {*OLD, *NEW} - {old}:
        (folder / name).unlink()
    os.utime(folder, (0, 0))
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            result = ", ".join(listed(tmp_path, StopsInside(then_stop=True))[len(STAYING) :])
        except BaseException as error:  # noqa: BLE001 - it must not go on with the tests
            result = str(error)
        os.write(writing, result.encode())
        os._exit(0)
    os.close(writing)
    assert os.WIFSTOPPED(os.waitpid(pid, os.WUNTRACED)[1])
    placed(folder, [new])
    (folder / old).unlink()
    os.kill(pid, signal.SIGCONT)
    os.waitpid(pid, 0)
    with os.fdopen(reading) as answer:
        assert answer.read() == new


@pytest.mark.parametrize(("age_ms", "scans"), [(2 * TIME_STEP_MS, 1), (0, 2)])
def test_a_folder_is_read_twice_only_if_it_may_have_changed(
    tmp_path: Path, age_ms: int, scans: int
) -> None:
    """A folder that was not changed for a while is read once, since lists delay edits."""
    folder, filesystem = tmp_path / "wal", StopsInside(then_stop=False)
    folder.mkdir()
    placed(folder, ["1"])
    changed_ns = 1_000_000 * (filesystem.now_ms() - age_ms)
    os.utime(folder, ns=(changed_ns, changed_ns))
    assert listed(tmp_path, filesystem) == ["1"]
    assert filesystem.scans == scans
