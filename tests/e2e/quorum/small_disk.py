"""A small file system in memory, which a test can fill up and clear; needs the right to mount."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

BALLAST = "ballast"


class SmallDisk:
    """A file system of some MiB."""

    def __init__(self, path: Path) -> None:
        """It is mounted at `path`."""
        self.path = path

    def fill(self) -> None:
        """Leave no room."""
        with (self.path / BALLAST).open("wb", buffering=0) as file:
            free = os.statvfs(self.path)
            size = free.f_bavail * free.f_frsize
            os.posix_fallocate(file.fileno(), 0, size)

    def clear(self) -> None:
        """Give the room back."""
        (self.path / BALLAST).unlink()


@contextmanager
def small_disks(paths: Sequence[Path], size_bytes: int) -> Iterator[list[SmallDisk]]:
    """A file system of that size at each path; where none can be mounted the test is skipped.

    Whatever uses them must end before.
    """
    with ExitStack() as mounted:
        for path in paths:
            path.mkdir(parents=True)
            options = ("-t", "tmpfs", "-o", f"size={size_bytes}", "tmpfs", str(path))
            if shutil.which("mount") is None:
                pytest.skip("no file systems can be mounted here: there is no `mount`")
            done = subprocess.run(["mount", *options], check=False, capture_output=True, text=True)
            if done.returncode:
                pytest.skip(f"no file systems can be mounted here: {done.stderr.strip()}")
            mounted.callback(
                subprocess.run, ["umount", "-l", str(path)], check=False, capture_output=True
            )
        yield [SmallDisk(path) for path in paths]
