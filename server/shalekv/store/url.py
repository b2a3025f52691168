"""The URL of a database: what it may look like, and the store that it opens."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import SplitResult, unquote, urlsplit

from shalekv.errors import InvalidUrl
from shalekv.runtime import Runtime
from shalekv.store.api import ObjectStore
from shalekv.store.local import LocalStore
from shalekv.store.memory import MemoryStore, named_objects

EXAMPLES = "file:///var/lib/shalekv (a folder) or memory://trial (gone when the process ends)"
LATER_SCHEMES = {
    "s3": "Amazon S3",
    "gs": "Google Cloud Storage",
    "az": "Azure Blob Storage",
}

_MEMORY_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
_BAD_ESCAPE = re.compile(r"%(?![0-9A-Fa-f]{2})")


@dataclass(frozen=True, slots=True)
class FileUrl:
    """``file:///path``: a folder of this machine. `path` is absolute and not the root."""

    path: Path


@dataclass(frozen=True, slots=True)
class MemoryUrl:
    """``memory://name``: the memory of this process."""

    name: str


DatabaseUrl = FileUrl | MemoryUrl


def parse_url(text: str) -> DatabaseUrl:
    """What `text` points at; raises `InvalidUrl`, which says how to write it."""
    if not text:
        raise InvalidUrl(f"the URL of the database is empty: write {EXAMPLES}")
    if not text.isprintable() or text != text.strip():
        raise InvalidUrl("the URL of the database has spaces around it, or control characters")
    if "://" not in text:
        raise InvalidUrl(
            f"{_without_secrets(text)!r} has no scheme: write {EXAMPLES}; "
            "a folder is written with its absolute path"
        )
    try:
        parts = urlsplit(text)
    except ValueError as error:
        raise InvalidUrl(f"the URL of the database cannot be read: {error}") from error
    _refuse_extras(parts, text)
    match parts.scheme:
        case "file":
            return _file_url(parts)
        case "memory":
            return _memory_url(parts)
        case scheme if scheme in LATER_SCHEMES:
            raise InvalidUrl(
                f"{scheme}:// ({LATER_SCHEMES[scheme]}) is not supported by this version: "
                f"write {EXAMPLES}"
            )
        case scheme:
            raise InvalidUrl(f"{scheme}:// is not a kind of store: write {EXAMPLES}")


def open_store(url: str, runtime: Runtime) -> ObjectStore:
    """The store at `url`. It is not touched yet; raises `InvalidUrl`."""
    match parse_url(url):
        case FileUrl(path):
            return LocalStore(path, runtime)
        case MemoryUrl(name):
            return MemoryStore(_wall_clock_ms, name=name, objects=named_objects(name))


def _wall_clock_ms() -> int:
    # The clock of a store, and not of what runs on it: that waits on `runtime.clock`.
    return time.time_ns() // 1_000_000


def _refuse_extras(parts: SplitResult, text: str) -> None:
    shown = _without_secrets(text)
    if "@" in parts.netloc:
        raise InvalidUrl(
            f"{shown}: credentials do not belong in a URL, which stands in logs: "
            "take them from the environment"
        )
    if "?" in text or "#" in text:
        raise InvalidUrl(
            f"{shown}: a URL of a database has no query and no fragment; "
            "write ? in a path as %3F and # as %23"
        )


def _file_url(parts: SplitResult) -> FileUrl:
    if parts.netloc:
        raise InvalidUrl(
            f"file://{parts.netloc}{parts.path} points at another machine: a path begins with "
            f"a third slash, as in file:///{parts.netloc}{parts.path}"
        )
    try:
        path = unquote(parts.path, errors="strict")
    except UnicodeDecodeError as error:
        raise InvalidUrl(f"file://{parts.path} is not UTF-8 behind its % signs") from error
    if _BAD_ESCAPE.search(parts.path) or "\0" in path:
        raise InvalidUrl(
            f"file://{parts.path} has a % that no two hexadecimal digits follow, or a %00: "
            "write % itself as %25"
        )
    names = [name for name in path.split("/") if name]
    if not names:
        raise InvalidUrl(
            "file:// needs the absolute path of a folder of its own, not the root: "
            "write file:///var/lib/shalekv"
        )
    if "." in names or ".." in names:
        raise InvalidUrl(f"file://{parts.path} has '.' or '..' in it: write the path in full")
    return FileUrl(Path("/", *names))


def _memory_url(parts: SplitResult) -> MemoryUrl:
    if parts.path or not _MEMORY_NAME.fullmatch(parts.netloc):
        raise InvalidUrl(
            f"memory://{parts.netloc}{parts.path} is not a name: write memory:// and then up to "
            "63 letters, digits, dots, dashes and underscores, as in memory://trial"
        )
    return MemoryUrl(parts.netloc)


def _without_secrets(text: str) -> str:
    """`text` without what may be a password or a token: user, query and fragment."""
    shown = re.split(r"[?#]", text, maxsplit=1)[0]
    return re.sub(r"(?<=://)[^/]*@", "", shown)
