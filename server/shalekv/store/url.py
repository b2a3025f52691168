"""Parses the URL of a database."""

from __future__ import annotations

import enum
import ipaddress
import re
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import SplitResult, quote, unquote, urlsplit

from shalekv.errors import InvalidUrl

EXAMPLES = (
    "s3://bucket/folder, gs://bucket/folder, az://container/folder, file:///var/lib/shalekv "
    "(a folder) or memory://trial (gone when the process ends)"
)
UNCHARGED_SCHEMES = ("file://", "memory://")  # of stores that charge nothing for a request
MAX_FOLDER_BYTES = 400  # together with the longest name of an object, all stores accept it

# Names that Amazon, Google and Azure have in common, and those that self-hosted servers allow too.
_BUCKET_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{1,220}[A-Za-z0-9]")
_FOLDER_NAME = re.compile(r"[A-Za-z0-9._~!$'()*+,;=@: -]+")
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


class Provider(enum.StrEnum):
    """The provider of a bucket, by the scheme of its URLs."""

    S3 = "s3"
    GOOGLE = "gs"
    AZURE = "az"


@dataclass(frozen=True, slots=True)
class BucketUrl:
    """``s3://bucket/folder`` and the like; the folder "" is the whole bucket."""

    provider: Provider
    bucket: str
    folder: str  # without a slash at its ends

    def __str__(self) -> str:
        """The URL, with characters percent-encoded where needed."""
        path = f"/{quote(self.folder)}" if self.folder else ""
        return f"{self.provider}://{self.bucket}{path}"


DatabaseUrl = FileUrl | MemoryUrl | BucketUrl


def parse_url(text: str) -> DatabaseUrl:
    """Parse a URL. Raises `InvalidUrl`, which says how to write it."""
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
        case scheme if scheme in set(Provider):
            return _bucket_url(Provider(scheme), parts)
        case scheme:
            raise InvalidUrl(f"{scheme}:// is not a kind of store: write {EXAMPLES}")


def is_loopback(host: str) -> bool:
    """Return whether only this machine reaches the host."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:  # a name
        return False


def _refuse_extras(parts: SplitResult, text: str) -> None:
    shown = _without_secrets(text)
    if "@" in parts.netloc:
        raise InvalidUrl(
            f"{shown}: credentials do not belong in a URL, which appears in logs: "
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
    names = _path_names(parts)
    if not names:
        raise InvalidUrl(
            "file:// needs the absolute path of a folder of its own, not the root: "
            "write file:///var/lib/shalekv"
        )
    return FileUrl(Path("/", *names))


def _bucket_url(provider: Provider, parts: SplitResult) -> BucketUrl:
    shown = f"{provider}://{parts.netloc}{parts.path}"
    if not parts.netloc:
        raise InvalidUrl(f"{shown} names no bucket: write {provider}://bucket/folder")
    if not _BUCKET_NAME.fullmatch(parts.netloc):
        raise InvalidUrl(
            f"{shown}: {parts.netloc!r} is not the name of a bucket: 3 or more letters, digits, "
            "dots and dashes. The host of an S3 server goes into --endpoint-url"
        )
    names = _path_names(parts)
    folder = "/".join(names)
    if len(folder) > MAX_FOLDER_BYTES or not all(map(_FOLDER_NAME.fullmatch, names)):
        raise InvalidUrl(
            f"{shown}: a folder is at most {MAX_FOLDER_BYTES} letters, digits and common marks of "
            "ASCII, so that every store takes it"
        )
    return BucketUrl(provider, parts.netloc, folder)


def _path_names(parts: SplitResult) -> list[str]:
    """Split the path at slashes, without empty parts. Raises `InvalidUrl`."""
    shown = f"{parts.scheme}://{parts.netloc}{parts.path}"
    try:
        path = unquote(parts.path, errors="strict")
    except UnicodeDecodeError as error:
        raise InvalidUrl(f"{shown} is not UTF-8 behind its % signs") from error
    if _BAD_ESCAPE.search(parts.path) or "\0" in path:
        raise InvalidUrl(
            f"{shown} has a % that no two hexadecimal digits follow, or a %00: "
            "write % itself as %25"
        )
    names = [name for name in path.split("/") if name]
    if "." in names or ".." in names:
        raise InvalidUrl(f"{shown} has '.' or '..' in it: write the path in full")
    return names


def _memory_url(parts: SplitResult) -> MemoryUrl:
    if parts.path or not _MEMORY_NAME.fullmatch(parts.netloc):
        raise InvalidUrl(
            f"memory://{parts.netloc}{parts.path} is not a name: write memory:// and then up to "
            "63 letters, digits, dots, dashes and underscores, as in memory://trial"
        )
    return MemoryUrl(parts.netloc)


def _without_secrets(text: str) -> str:
    """Remove user, query and fragment, which may hold a password or a token."""
    shown = re.split(r"[?#]", text, maxsplit=1)[0]
    return re.sub(r"(?<=://)[^/]*@", "", shown)
