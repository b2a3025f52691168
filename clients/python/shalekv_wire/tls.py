"""TLS of both sides: contexts made of files that are read again when they change.

A new connection gets the context of the newest files that could be used together. Those that
cannot, because a half of a pair is not replaced yet or is damaged, are logged once, and the last
good ones stay in use: contexts are made of what was read, and not of the files. Connections that
exist keep theirs. Versions are TLS 1.2 and later, and ALPN must choose `h2`.

A change makes another context, so no session of the one before can be resumed: a client whose
authority was removed shows its certificate again, and is refused. So is one whose certificate is in
a list of revoked certificates, which the file of a server's authorities may hold. A list that has
ended refuses all certificates of its authority: then there is another context as well.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import ssl
import stat
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import TypeAlias

ALPN = "h2"
# Of TLS 1.2: with forward secrecy, and authenticated. Those of TLS 1.3 all are.
CIPHERS = "ECDHE+AESGCM:ECDHE+CHACHA20"
LOOK_INTERVAL_S = 1.0  # between two looks at the files
# Files younger than this are compared by their contents: on some file systems two changes within
# this time give the same time of modification. Lists that vanish may be in the half of a file that
# is not written yet: the rest is used when it was the same for this time.
SETTLING_S = 3.0
FILE_BYTES_MAX = 8 * 1024 * 1024
END_NOTICE = timedelta(days=30)  # certificates that end sooner are logged
END_NOTICE_INTERVAL_S = 24 * 3_600.0  # between two such lines
LIST_NOTICE = 4  # lists of revoked certificates are logged in the last quarter of their time

_PEM_BLOCK = re.compile("-----BEGIN CERTIFICATE-----.+?-----END CERTIFICATE-----", re.DOTALL)
# OpenSSL reads those that are called "X509 CRL" and no others, which must not go unnoticed.
_LIST_BLOCK = re.compile(rb"-----BEGIN [A-Z0-9 ]*CRL-----")
_COMMON_NAME = bytes.fromhex("0603550403")  # 2.5.4.3, encoded
_EXPLICIT_VERSION = 0xA0  # tag of the first field of a certificate, which may be missing
_UTC_TIME = 0x17  # tag of a time whose year has two digits

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """Paths of PEM files; an empty path means that there is none.

    `certificate` and `key` are of this side: both or neither. `authority` has the certificates of
    the authorities by which the other side is verified. A server without it asks clients for no
    certificate; a client without it trusts the authorities of the system.
    """

    certificate: str = ""
    key: str = ""
    authority: str = ""

    @property
    def paths(self) -> tuple[str, ...]:
        """The files that there are."""
        return tuple(filter(None, (self.certificate, self.key, self.authority)))


class UnusableFiles(ValueError):
    """Files that no context can be made of. The text says which, and why; it has nothing secret."""


class UnusableYet(UnusableFiles):
    """Files that may become usable without another change."""


@dataclass(frozen=True, slots=True)
class RevocationList:
    """A list of revoked certificates in a file of authorities."""

    authority: str  # the name of the one that made it
    begins: datetime
    ends: datetime  # from then on all certificates of the authority are refused

    def is_due(self, now: datetime) -> bool:
        """Return whether it is time for the next list."""
        return self.ends - now < (self.ends - self.begins) / LIST_NOTICE

    def __str__(self) -> str:
        """Describe it for logs."""
        until = f"{self.ends:%Y-%m-%d %H:%M} UTC"
        return f"list of revoked certificates of {self.authority!r}, valid until {until}"


Lists: TypeAlias = tuple[RevocationList, ...]
# Reads the lists in a file of authorities. Raises `ValueError` for what would refuse good clients.
ReadLists: TypeAlias = Callable[[bytes], Lists]


def refuse_lists(_pem: bytes) -> Lists:
    """Raise `ValueError`, for a transport that checks no lists."""
    raise ValueError("lists of revoked certificates are checked by the native transport alone")


@dataclass(frozen=True, slots=True)
class Contents:
    """Contents of `TlsFiles`, which belong together; b"" of a path that is empty."""

    certificate: bytes = b""
    key: bytes = b""
    authority: bytes = b""

    def __repr__(self) -> str:
        """Show nothing: one of them is a secret."""
        return "Contents(...)"

    def digest(self) -> bytes:
        """Return the digest of all of them."""
        whole = hashlib.sha256()
        for each in (self.certificate, self.key, self.authority):
            whole.update(len(each).to_bytes(8))
            whole.update(each)
        return whole.digest()


class TlsContexts:
    """The context for the next connection of one side."""

    def __init__(
        self, files: TlsFiles, *, is_server: bool, read_lists: ReadLists = refuse_lists
    ) -> None:
        """Read the files. `read_lists` is called if a server's authorities have lists.

        Raises:
            UnusableFiles: a file cannot be read, or they are not PEM, or do not belong together, or
                the key is protected by a password, or one of them is missing, or `read_lists` has
                raised.
        """
        if bool(files.certificate) != bool(files.key):
            raise UnusableFiles("a certificate and its key belong together: give both")
        if is_server and not files.certificate:
            raise UnusableFiles("a server needs a certificate and its key")
        self.files = files
        self._make = partial(_made, files, is_server=is_server, read_lists=read_lists)
        self._stats = _stats(files)  # None: they are young
        self.contents = _read(files)  # that are in use
        self._context, self._lists = self._make(self.contents)
        self._seen = self.contents.digest()
        self._looked_s = time.monotonic()
        self._found = self._seen, self._looked_s  # by the last look, and since when
        self._warned_s = float("-inf")
        self._ends = _first_end(files, self.contents)
        self._ended_lists = 0  # -1: unknown
        self._look_at_lists()
        self._warn_of_end()

    def current(self) -> ssl.SSLContext:
        """Return the context of the newest files that are good.

        Looks at the files at most once a second.
        """
        now_s = time.monotonic()
        if now_s - self._looked_s >= LOOK_INTERVAL_S:
            self._looked_s = now_s
            self._look()
        self._look_at_lists()
        self._warn_of_end()
        return self._context

    def _look(self) -> None:
        """Read the files again if they have changed."""
        stats = _stats(self.files)
        if stats is not None and stats == self._stats:
            return
        self._stats = stats
        try:
            contents = _read(self.files)
        except UnusableFiles as error:
            self._found = b"", self._looked_s
            self._refuse(str(error).encode(), error)
            return
        digest = contents.digest()
        if digest != self._found[0]:
            self._found = digest, self._looked_s
        if digest == self._seen:
            return
        if contents == self.contents:
            self._seen = digest
            _log.info("TLS files are again those that are in use: %s", self._ends)
            return
        try:
            context, lists = self._make(contents)
        except UnusableYet as error:
            self._stats = None
            self._refuse(str(error).encode(), error)
            return
        except UnusableFiles as error:
            self._refuse(digest, error)
            return
        had_lists = bool(self._lists)
        if had_lists and not lists and self._looked_s - self._found[1] < SETTLING_S:
            self._stats = None
            return
        self._lists, self._ended_lists, self._seen = lists, 0, digest
        self._context, self.contents = context, contents
        self._ends, self._warned_s = _first_end(self.files, contents), float("-inf")
        names = ", ".join(self.files.paths)
        _log.info(
            "TLS files are used from now on: %s", "; ".join(map(str, (names, self._ends, *lists)))
        )
        if had_lists and not lists:
            path = self.files.authority
            _log.warning("%s has no lists of revoked certificates any more: all are accepted", path)

    def _refuse(self, seen: bytes, error: UnusableFiles) -> None:
        """Log once that the files cannot be used."""
        if seen != self._seen:
            self._seen = seen
            _log.warning("TLS files cannot be used, and those before stay in use: %s", error)

    def _look_at_lists(self) -> None:
        """Refuse sessions from before the end of a list, and log that end at once.

        Sessions are resumed without a look at certificates, but not in another context.
        """
        now = datetime.now(UTC)
        ended_lists = sum(each.ends <= now for each in self._lists)
        if ended_lists == self._ended_lists:
            return
        try:
            self._context = _context(self.files, self.contents, is_server=True)
        except UnusableFiles as error:  # such as when no descriptor is left
            self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)  # refuses all: no certificate
            if self._ended_lists >= 0:
                _log.error("all clients are refused, since a list has ended, and now %s", error)
            self._ended_lists = -1
            return
        self._ended_lists, self._warned_s = ended_lists, float("-inf")

    def _warn_of_end(self) -> None:
        """Log certificates and lists that end soon, once a day."""
        now_s, now = time.monotonic(), datetime.now(UTC)
        if now_s - self._warned_s <= END_NOTICE_INTERVAL_S:
            return
        left, path = self._ends.ends - now, self.files.authority
        if left < END_NOTICE:
            self._warned_s = now_s
            what = "has expired" if left < timedelta() else f"expires in {left.days} days"
            _log.warning("a certificate %s: %s", what, self._ends)
        for each in self._lists:
            if each.ends <= now:
                _log.error("all clients of an authority are refused: %s has an old %s", path, each)
            elif each.is_due(now):
                _log.warning("%s needs another list, or clients will be refused: %s", path, each)
            else:
                continue
            self._warned_s = now_s


@dataclass(frozen=True, slots=True)
class _End:
    """A certificate, for logs."""

    path: str
    subject: str
    ends: datetime

    def __str__(self) -> str:
        until = f"{self.ends:%Y-%m-%d %H:%M} UTC"
        return f"certificate {self.subject!r} of {self.path}, valid until {until}"


def _read(files: TlsFiles) -> Contents:
    """Read all files. Raises `UnusableFiles`."""
    return Contents(*map(_read_file, (files.certificate, files.key, files.authority)))


def _read_file(path: str) -> bytes:
    if not path:
        return b""
    try:
        if not stat.S_ISREG(Path(path).stat().st_mode):
            raise UnusableFiles(f"{path}: it is no regular file")
        with Path(path).open("rb") as file:
            data = file.read(FILE_BYTES_MAX + 1)
    except OSError as error:
        raise UnusableFiles(f"{path}: {error.strerror or error}") from None
    if not data or len(data) > FILE_BYTES_MAX:
        raise UnusableFiles(f"{path}: it is empty" if not data else f"{path}: it is too large")
    return data


def _stats(files: TlsFiles) -> tuple[tuple[int, ...], ...] | None:
    """Return what differs when a file was replaced; None: compare the contents."""
    found = []
    try:
        for path in files.paths:
            seen = Path(path).stat()
            if abs(time.time() - seen.st_mtime) < SETTLING_S:
                return None
            found.append(
                (seen.st_dev, seen.st_ino, seen.st_size, seen.st_mtime_ns, seen.st_ctime_ns)
            )
    except OSError:
        return None
    return tuple(found)


def _made(
    files: TlsFiles, contents: Contents, *, is_server: bool, read_lists: ReadLists
) -> tuple[ssl.SSLContext, Lists]:
    """Make a context; returns it, and the lists that it checks. Raises `UnusableFiles`."""
    context = _context(files, contents, is_server=is_server)
    if not is_server or _LIST_BLOCK.search(contents.authority) is None:
        return context, ()
    try:
        lists = read_lists(contents.authority)
    except ValueError as error:
        raise UnusableFiles(f"{files.authority}: {error}") from None
    now = datetime.now(UTC)
    for each in lists:
        if each.begins > now:
            begins = f"{each.begins:%Y-%m-%d %H:%M:%S} UTC"
            raise UnusableYet(f"{files.authority}: the {each}, begins at {begins}")
    return context, lists


def _context(files: TlsFiles, contents: Contents, *, is_server: bool) -> ssl.SSLContext:
    """Make a context. Raises `UnusableFiles`."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if is_server else ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_ciphers(CIPHERS)
    context.options |= ssl.OP_NO_COMPRESSION | ssl.OP_NO_RENEGOTIATION
    context.set_alpn_protocols([ALPN])
    if files.certificate:
        _load_pair(context, files, contents)
    if files.authority:
        _load_authorities(context, files.authority, contents.authority)
    elif not is_server:
        context.load_default_certs(ssl.Purpose.SERVER_AUTH)
    if is_server and files.authority:
        context.verify_mode = ssl.CERT_REQUIRED
        if _LIST_BLOCK.search(contents.authority) is not None:
            _load_lists(context, files.authority, contents.authority)
    return context


def _load_authorities(context: ssl.SSLContext, path: str, pem: bytes) -> None:
    if pem.count(b"-----B") != pem.count(b"-----END "):
        raise UnusableFiles(f"{path}: it is cut off")
    try:
        context.load_verify_locations(cadata=pem.decode("ascii", "ignore"))
    except (ssl.SSLError, ValueError):
        raise UnusableFiles(f"{path}: no certificates in PEM") from None


def _load_lists(context: ssl.SSLContext, path: str, pem: bytes) -> None:
    try:
        with _as_file(pem) as in_memory:
            context.load_verify_locations(cafile=in_memory)  # `cadata` would take no lists
    except ssl.SSLError:
        raise UnusableFiles(f"{path}: a damaged list of revoked certificates") from None
    except OSError as error:
        raise UnusableFiles(f"{path}: {error.strerror}") from None
    context.verify_flags |= ssl.VERIFY_CRL_CHECK_CHAIN


@contextmanager
def _as_file(pem: bytes) -> Iterator[str]:
    """Yield the path of a file in memory: OpenSSL takes keys and lists from files alone.

    A system without such files has a temporary one instead, which its owner alone can read.
    """
    if sys.platform == "linux" and Path("/proc/self/fd").exists():
        with os.fdopen(os.memfd_create("pem"), "wb", buffering=0) as file:
            file.write(pem)
            yield f"/proc/self/fd/{file.fileno()}"
    else:
        with NamedTemporaryFile(buffering=0) as file:
            file.write(pem)
            yield file.name


def _load_pair(context: ssl.SSLContext, files: TlsFiles, contents: Contents) -> None:
    def refuse_password() -> str:
        # Without this, OpenSSL would ask for it on the terminal.
        raise UnusableFiles(f"{files.key}: the key is protected by a password")

    if b"-----BEGIN CERTIFICATE-----" not in contents.certificate:
        raise UnusableFiles(f"{files.certificate}: no certificate in PEM")
    if b"PRIVATE KEY-----" not in contents.key:
        raise UnusableFiles(f"{files.key}: no private key in PEM")
    try:
        with _as_file(contents.certificate) as certificate, _as_file(contents.key) as key:
            context.load_cert_chain(certificate, key, password=refuse_password)
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            text = f"the key {files.key} is not that of the certificate {files.certificate}"
        else:
            why = error.reason or "damaged PEM"
            text = f"{files.certificate} and {files.key} cannot be loaded: {why}"
        raise UnusableFiles(text) from None
    except OSError as error:
        raise UnusableFiles(f"{files.certificate}, {files.key}: {error.strerror}") from None


def _first_end(files: TlsFiles, contents: Contents) -> _End:
    """Return the certificate that ends first: of this side's, or of the authorities if it has none.

    Authorities that end are no news beside: files of them keep old ones for a while.
    """
    path, data = files.certificate, contents.certificate
    if not path:
        path, data = files.authority, contents.authority
    found = [_end_of(path, each) for each in _PEM_BLOCK.findall(data.decode("ascii", "ignore"))]
    never = _End(path, "of the system", datetime.max.replace(tzinfo=UTC))
    return min(found, key=lambda each: each.ends, default=never)


def _end_of(path: str, pem: str) -> _End:
    try:
        return _parsed(path, pem)
    except (ValueError, IndexError):  # a form of a time or a name that no authority uses
        return _End(path, "in another form", datetime.max.replace(tzinfo=UTC))


def _parsed(path: str, pem: str) -> _End:
    """Take the name and the end from a certificate that OpenSSL has accepted.

    Certificate ::= SEQUENCE { SEQUENCE { [0] version, serial, algorithm, issuer,
    SEQUENCE { not before, not after }, subject, ... }, ... }
    """
    data = ssl.PEM_cert_to_DER_cert(pem)
    _, at, _ = _element(data, 0)
    _, at, _ = _element(data, at)
    fields = []
    for _ in range(6):
        kind, begin, end = _element(data, at)
        at = end
        if kind != _EXPLICIT_VERSION:
            fields.append((begin, end))
    (serial_begin, serial_end), (validity, _), (subject_begin, subject_end) = (
        fields[0],
        fields[3],
        fields[4],
    )
    _, _, before_end = _element(data, validity)
    kind, begin, end = _element(data, before_end)
    text = data[begin:end].decode("ascii")
    if kind == _UTC_TIME:
        text = ("19" if text >= "5" else "20") + text
    ends = datetime.strptime(text, "%Y%m%d%H%M%SZ").replace(tzinfo=UTC)
    found = data.rfind(_COMMON_NAME, subject_begin, subject_end)
    if found < 0:
        return _End(path, f"number {data[serial_begin:serial_end].hex()}", ends)
    _, begin, end = _element(data, found + len(_COMMON_NAME))
    return _End(path, data[begin:end].decode("utf-8", "replace"), ends)


def _element(data: bytes, at: int) -> tuple[int, int, int]:
    """Return the tag of an element of DER, and where its contents begin and end."""
    kind, size, begin = data[at], data[at + 1], at + 2
    if size & 0x80:
        count = size & 0x7F
        size, begin = int.from_bytes(data[begin : begin + count]), begin + count
    return kind, begin, begin + size
