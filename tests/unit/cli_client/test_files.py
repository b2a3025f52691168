"""Reading and writing of files and pipes: gzip, identity, interruption, atomic replacement."""

from __future__ import annotations

import gzip
import os
import stat
import threading
from pathlib import Path

import pytest

from shalekv.cli.console.atomic_file import atomic_file
from shalekv.cli.load.lines import Lines
from shalekv.cli.load.source import InputSource


@pytest.mark.parametrize("compressed", [False, True])
@pytest.mark.parametrize("step", [1, 2, 7, 100])
def test_a_pipe_is_read_whole(*, compressed: bool, step: int) -> None:
    """A pipe is read completely in any pieces, even if the magic of gzip comes byte by byte."""
    content = b"".join(b"line %d\n" % number for number in range(20))
    data = gzip.compress(content) if compressed else content
    far, near = os.pipe()

    def feed() -> None:
        with os.fdopen(near, "wb", buffering=0) as pipe:
            for at in range(0, len(data), step):
                pipe.write(data[at : at + step])

    feeder = threading.Thread(target=feed)
    feeder.start()
    with os.fdopen(far, "rb") as pipe:
        source = InputSource(pipe)
        assert source.identity() is None
        assert b"".join(Lines(source.open())) == content
        source.close()
    feeder.join()


def test_a_file_is_known_again(tmp_path: Path) -> None:
    """A file is identified by size and beginning, not by name or time."""
    paths = [tmp_path / name for name in "abcd"]
    for path, content in zip(paths, [b"x" * 99, b"x" * 99, b"x" * 98, b"y" * 99], strict=True):
        path.write_bytes(content)
    identities = []
    for path in paths:
        with path.open("rb") as file:
            identities.append(InputSource(file).identity())
    assert identities[0] == identities[1] is not None
    assert len({str(identity) for identity in identities}) == 3


def test_reading_can_be_ended_from_outside() -> None:
    """Closing the source ends a blocked read."""
    far, near = os.pipe()
    with os.fdopen(far, "rb") as pipe:
        source = InputSource(pipe)
        found: list[bytes] = []
        reader = threading.Thread(target=lambda: found.extend(Lines(source.open())))
        reader.start()
        source.close()
        reader.join()
    os.close(near)
    assert found == []


def test_a_file_appears_whole(tmp_path: Path) -> None:
    """The old file stays until the new one is complete, and no temporary file is left."""
    path = tmp_path / "file"
    path.write_bytes(b"before")
    with atomic_file(path) as file:
        file.write(b"after")
        file.flush()
        assert path.read_bytes() == b"before"
    assert path.read_bytes() == b"after"
    assert list(tmp_path.iterdir()) == [path]


def test_links_and_devices_stay_what_they_are(tmp_path: Path) -> None:
    """A link leads to the new file, and a device is written directly."""
    path, link = tmp_path / "file", tmp_path / "link"
    path.write_bytes(b"before")
    link.symlink_to(path)
    with atomic_file(link) as file:
        file.write(b"after")
    assert (link.is_symlink(), path.read_bytes()) == (True, b"after")
    with atomic_file(Path(os.devnull)) as file:
        file.write(b"nowhere")
    assert stat.S_ISCHR(Path(os.devnull).stat().st_mode)
