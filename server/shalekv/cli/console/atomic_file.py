"""Files that appear whole or not at all: written beside their place, synced, then renamed."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, cast


@contextmanager
def whole_file(path: Path) -> Iterator[BinaryIO]:
    """A file to write into, which is at `path` when this is left without an error.

    What was at `path` is there until then, and stays if there is an error. A device or a pipe is
    written directly.
    """
    place = path.resolve()  # through links, which stay what they are
    if _is_special(place):
        with place.open("wb") as file:
            yield cast("BinaryIO", file)
        return
    beside = place.with_name(f".{place.name}.{os.getpid()}.part")
    try:
        with beside.open("wb") as file:
            yield cast("BinaryIO", file)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(place)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise
    _sync_folder(place.parent)


def _is_special(place: Path) -> bool:
    try:
        return not stat.S_ISREG(place.stat().st_mode)
    except FileNotFoundError:
        return False


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
