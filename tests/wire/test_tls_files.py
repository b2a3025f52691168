"""Files of TLS: what is refused at the start, and what happens when they are replaced."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from shalekv_wire.tls import TlsContexts, TlsFiles, UnusableFiles
from tests.kit.certificates import LOCAL, Authority
from tests.kit.constants import constants

CA = Authority()
PAIR, OTHER = CA.issue(*LOCAL), CA.issue(*LOCAL, common_name="other")


@pytest.fixture(autouse=True)
def looking_at_once() -> Iterator[None]:
    """Look at the files for each connection, not once a second."""
    with constants({"shalekv_wire.tls:LOOK_INTERVAL_S": 0}):
        yield


@pytest.fixture
def files(tmp_path: Path) -> TlsFiles:
    """The files of a server that asks for certificates."""
    return replace(PAIR.write(tmp_path, "server"), authority=CA.write(tmp_path))


def put(path: str, data: bytes) -> None:
    """Replace a file by one step, as tools do."""
    new = Path(f"{path}.new")
    new.write_bytes(data)
    new.replace(path)


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return the messages since the last look, without the names of folders."""
    found = [each.getMessage() for each in caplog.records]
    caplog.clear()
    return found


@pytest.mark.parametrize(
    ("changed", "problem"),
    [
        ({"key": "missing"}, "missing: No such file or directory"),
        ({"certificate": "."}, "no regular file"),
        ({"certificate": ""}, "belong together"),
        ({"key": ""}, "belong together"),
        ({"certificate": "", "key": ""}, "a server needs a certificate"),
        ({"key": "other.key"}, "is not that of the certificate"),
        ({"key": "protected.key"}, "the key is protected by a password"),
        ({"key": "ca.crt"}, "no private key in PEM"),
        ({"certificate": "server.key"}, "no certificate in PEM"),
        ({"certificate": "half.crt"}, "damaged PEM"),
        ({"authority": "server.key"}, "no certificates in PEM"),
        ({"authority": "empty"}, "it is empty"),
    ],
)
def test_start_is_refused_in_a_sentence_that_names_the_file(
    files: TlsFiles,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    changed: dict[str, str],
    problem: str,
) -> None:
    """Files of which no context can be made are refused with their names and the reason."""
    monkeypatch.chdir(tmp_path)
    OTHER.write(tmp_path, "other")
    PAIR.with_password().write(tmp_path, "protected")
    Path("half.crt").write_bytes(PAIR.certificate[:200])
    Path("empty").touch()
    with pytest.raises(UnusableFiles) as caught:
        TlsContexts(replace(files, **changed), is_server=True)
    assert problem in str(caught.value)
    assert all(path in str(caught.value) for path in changed.values() if path)
    assert "PRIVATE" not in str(caught.value)


def test_replaced_files_are_used_as_soon_as_they_belong_together(
    files: TlsFiles, caplog: pytest.LogCaptureFixture
) -> None:
    """A certificate without its key leaves the old pair in use; both outcomes are logged once."""
    caplog.set_level(logging.INFO)
    contexts = TlsContexts(files, is_server=True)
    first = contexts.current()
    assert contexts.current() is first
    assert not caplog.records
    put(files.certificate, OTHER.certificate)
    assert [contexts.current() for _ in range(3)] == [first] * 3
    [line] = lines(caplog)
    assert "those before stay in use" in line
    assert "is not that of the certificate" in line
    put(files.key, OTHER.key)
    second = contexts.current()
    assert second is not first
    assert contexts.current() is second
    [line] = lines(caplog)
    assert files.certificate in line
    assert "'other'" in line
    assert contexts.contents.key == OTHER.key


@pytest.mark.parametrize("name", ["certificate", "key", "authority"])
def test_missing_file_leaves_the_last_good_ones(
    files: TlsFiles, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    """A file that is away for a while is logged, and so is that it has come back."""
    caplog.set_level(logging.INFO)
    contexts = TlsContexts(files, is_server=True)
    first, path = contexts.current(), Path(getattr(files, name))
    data = path.read_bytes()
    path.unlink()
    assert [contexts.current() for _ in range(3)] == [first] * 3
    path.write_bytes(data)
    assert [contexts.current() for _ in range(3)] == [first] * 3
    away, back = lines(caplog)
    assert f"{path}: No such file" in away
    assert "again those that are in use" in back


def test_swapped_link_replaces_all_files_at_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Files behind a link to a folder, as Kubernetes mounts secrets, are noticed when it moves."""
    caplog.set_level(logging.INFO)
    files = _mounted(tmp_path)
    contexts = TlsContexts(files, is_server=True)
    first = contexts.current()
    (tmp_path / "new").symlink_to("2")
    (tmp_path / "new").replace(tmp_path / "data")
    assert contexts.current() is not first
    assert len(lines(caplog)) == 1


def _mounted(folder: Path) -> TlsFiles:
    for name, pair in (("1", PAIR), ("2", OTHER)):
        (folder / name).mkdir()
        pair.write(folder / name, "tls")
    (folder / "data").symlink_to("1")
    for name in ("tls.crt", "tls.key"):
        (folder / name).symlink_to(f"data/{name}")
    return TlsFiles(certificate=str(folder / "tls.crt"), key=str(folder / "tls.key"))


def test_change_within_the_resolution_of_a_clock_is_noticed(
    files: TlsFiles, caplog: pytest.LogCaptureFixture
) -> None:
    """A file of the same size, place and time of modification is noticed while it is young."""
    contexts = TlsContexts(files, is_server=True)
    first = contexts.current()
    before = Path(files.key).stat()
    text = PAIR.key.decode()
    Path(files.key).write_text(text.lower().ljust(before.st_size)[: before.st_size])
    os.utime(files.key, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert contexts.current() is first
    [line] = lines(caplog)
    assert "no private key" in line


def test_files_are_read_only_when_they_have_changed(
    files: TlsFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A look at files that are old and the same opens none of them."""
    for path in files.paths:
        os.utime(path, (1_000_000_000, 1_000_000_000))
    contexts = TlsContexts(files, is_server=True)
    opened: list[Path] = []
    real = Path.open

    def noted(path: Path, *args: Any) -> Any:
        opened.append(path)
        return real(path, *args)

    monkeypatch.setattr(Path, "open", noted)
    contexts.current()
    assert not opened
    os.utime(files.key)
    contexts.current()
    assert len(opened) == len(files.paths)


@pytest.mark.parametrize(
    ("days", "said"), [(60, []), (29.5, ["expires in 29 days"]), (-0.5, ["has expired"])]
)
def test_certificate_that_ends_soon_is_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, days: float, said: list[str]
) -> None:
    """Operators are warned in the last 30 days, once."""
    pair = CA.issue(uris=["spiffe://example.org/a"], valid=(-3, days))
    contexts = TlsContexts(pair.write(tmp_path, "server"), is_server=True)
    contexts.current()
    found = lines(caplog)
    assert len(found) == len(said)
    assert all(part in line for part, line in zip(said, found, strict=True))


def test_no_secret_is_shown(files: TlsFiles) -> None:
    """Neither contexts nor their contents show a key."""
    contexts = TlsContexts(files, is_server=True)
    shown = repr(contexts) + repr(contexts.contents) + repr(contexts.files)
    assert PAIR.key.decode().splitlines()[1] not in shown


def test_client_needs_no_files(tmp_path: Path) -> None:
    """A client trusts the authorities of the system, or those of a file."""
    for files in (TlsFiles(), TlsFiles(authority=CA.write(tmp_path))):
        context = TlsContexts(files, is_server=False).current()
        assert context.check_hostname
