"""Static tokens: their text, and the file with their hashes, which is read again when it changes.

A token is the text

    shalekv_<id>_<secret><checksum>

of letters and digits: 12 of the id, which is public; 43 of the secret, which is 256 random bits;
and 6 of the CRC-32 of all that is before it. So a program that looks for leaked secrets finds
tokens by the pattern `shalekv_[0-9A-Za-z]{12}_[0-9A-Za-z]{49}`, and a token that was cut or
mistyped is told from one that is unknown.

The file has a line for each token: its id, the name of its principal, the SHA-256 of its text, and
when it was created and expires (`never`). A fast hash is right here: it is the guessing of
passwords that a slow one makes expensive, and nobody guesses 256 random bits. Empty lines, and
those that begin with `#`, are comments.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
import string
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

import structlog

from shalekv.errors import InvalidSetting, Unauthenticated
from shalekv.protocol.access import Principal
from shalekv.server.access.identity import NEVER_MS, Identity
from shalekv.wording import MS_PER_S, moment

PREFIX = "shalekv_"
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@/-]{0,99}")
ID_CHARS, SECRET_BYTES, SECRET_CHARS, CHECK_CHARS = 12, 32, 43, 6
FILE_BYTES_MAX = 16 << 20
NEVER = "never"
HEADING = "# id name sha256 created expires"

_ALPHABET = string.digits + string.ascii_uppercase + string.ascii_lowercase
_CHARS = "[0-9A-Za-z]"
_TEXT = re.compile(
    rf"{PREFIX}({_CHARS}{{{ID_CHARS}}})_{_CHARS}{{{SECRET_CHARS}}}({_CHARS}{{{CHECK_CHARS}}})"
)
_ID = re.compile(rf"{_CHARS}{{{ID_CHARS}}}")
_DIGEST = re.compile(r"[0-9a-f]{64}")
_TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", re.ASCII)
# Compared with what is given for an id that is unknown, which so costs as much as a wrong secret.
_NOBODY = bytes(hashlib.sha256().digest_size)

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class StaticToken:
    """Record of a token: a line of the file."""

    token_id: str
    name: str
    digest: bytes = field(repr=False)  # SHA-256 of its text
    created_ms: int
    expires_at_ms: float = NEVER_MS

    def line(self) -> str:
        """Return the line of the file, without its end."""
        expires = NEVER if self.expires_at_ms == NEVER_MS else _word(int(self.expires_at_ms))
        return f"{self.token_id} {self.name} {self.digest.hex()} {_word(self.created_ms)} {expires}"


class TokenLineDamaged(ValueError):
    """A line of a token file is not what it should be. The message does not show it."""

    def __init__(self, line: int, problem: str) -> None:
        """`line` is its number, from 1 on."""
        super().__init__(f"line {line}: {problem}")


def new_token(name: str, *, now_ms: int, lifetime_ms: float = NEVER_MS) -> tuple[str, StaticToken]:
    """Make a token; returns its text, which is kept nowhere, and the line of the file."""
    token_id = "".join(secrets.choice(_ALPHABET) for _ in range(ID_CHARS))
    secret = _in_letters(int.from_bytes(secrets.token_bytes(SECRET_BYTES)), SECRET_CHARS)
    text = f"{PREFIX}{token_id}_{secret}"
    text += _check_of(text)
    return text, StaticToken(token_id, name, _digest_of(text), now_ms, now_ms + lifetime_ms)


def parse_token(text: str) -> str:
    """Return the id of a token. Raises ValueError, with a message that does not show the text."""
    found = _TEXT.fullmatch(text)
    if found is None:
        raise ValueError("it has not the form of a token: was it cut?")
    if not hmac.compare_digest(_check_of(text[:-CHECK_CHARS]), found[2]):
        raise ValueError("its checksum does not match: was it mistyped?")
    return found[1]


def parse_tokens(text: str) -> Mapping[str, StaticToken]:
    """Return the tokens of a file by their id. Raises `TokenLineDamaged`."""
    tokens: dict[str, StaticToken] = {}
    for number, line in token_lines(text):
        token = _parse_line(number, line)
        if token.token_id in tokens:
            raise TokenLineDamaged(number, "another line has the same id")
        tokens[token.token_id] = token
    return tokens


def token_lines(text: str) -> Iterator[tuple[int, str]]:
    """Yield the lines that are not comments, with their numbers."""
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip() and not line.startswith("#"):
            yield number, line


def read_token_file(path: Path) -> str:
    """Return the text of a token file. Raises OSError, and ValueError for what is not text."""
    with path.open("rb") as file:
        data = file.read(FILE_BYTES_MAX + 1)
    if len(data) > FILE_BYTES_MAX:
        raise ValueError(f"it is larger than {FILE_BYTES_MAX} bytes")
    try:
        return data.decode("ascii")
    except UnicodeDecodeError as error:
        raise TokenLineDamaged(data.count(b"\n", 0, error.start) + 1, "not ASCII") from None


class TokenFile:
    """The static tokens that a process accepts: those of the newest file that is not damaged."""

    def __init__(self, path: str) -> None:
        """Read the file. Raises `InvalidSetting`."""
        self._path = Path(path)
        self._problem = ""
        self._stamp: object = None  # of the file when it was read
        try:
            self._stamp = _stamp_of(self._path)
            self._tokens = parse_tokens(read_token_file(self._path))
        except (OSError, ValueError) as error:
            raise InvalidSetting(f"--tokens-file {path}: {_problem_of(error)}") from None

    def refresh(self) -> None:
        """Read the file if it has changed. Blocks.

        The last good ones stay if it cannot be read, or is damaged; that is logged once.
        """
        stamp = None
        try:
            stamp = _stamp_of(self._path)
            if stamp == self._stamp:
                return
            tokens = parse_tokens(read_token_file(self._path))
        except (OSError, ValueError) as error:
            self._stamp, problem = stamp, _problem_of(error)
            if problem != self._problem:
                _log.error("token file not used", path=str(self._path), problem=problem)
            self._problem = problem
            return
        self._stamp, self._problem = stamp, ""
        self._tokens = {
            each: old if (old := self._tokens.get(each)) == new else new
            for each, new in tokens.items()
        }
        _log.info("token file read again", path=str(self._path), tokens=len(tokens))

    def identify(self, text: str) -> Identity:
        """Return the identity that a token proves, expired or not. Raises `Unauthenticated`."""
        try:
            token_id = parse_token(text)
        except ValueError as error:
            raise Unauthenticated(f"the token is damaged: {error}") from None
        token = self._tokens.get(token_id)
        expected = _NOBODY if token is None else token.digest
        if not hmac.compare_digest(_digest_of(text), expected) or token is None:
            raise Unauthenticated("the token is not known")
        return Identity(Principal(f"token:{token.name}"), token.expires_at_ms, token)

    def has(self, token: StaticToken) -> bool:
        """Return whether the file still has the token, unchanged."""
        return self._tokens.get(token.token_id) is token


def _parse_line(number: int, line: str) -> StaticToken:
    try:
        token_id, name, digest, created, expires = line.split()
    except ValueError:
        raise TokenLineDamaged(number, f"not five words: {HEADING[2:]}") from None
    if not _ID.fullmatch(token_id):
        raise TokenLineDamaged(number, "the id is not one")
    if not NAME.fullmatch(name):
        raise TokenLineDamaged(number, "the name is not one")
    if not _DIGEST.fullmatch(digest):
        raise TokenLineDamaged(number, "the SHA-256 is not one")
    try:
        created_ms = _parse_time(created)
        expires_at_ms = NEVER_MS if expires == NEVER else _parse_time(expires)
    except ValueError:
        raise TokenLineDamaged(number, "a time is not like 2026-05-01T12:30:00Z") from None
    return StaticToken(token_id, name, bytes.fromhex(digest), created_ms, expires_at_ms)


def _word(time_ms: int) -> str:
    """A time as one word of a line."""
    return moment(time_ms).replace(" ", "T")


def _parse_time(text: str) -> int:
    if not _TIME.fullmatch(text):
        raise ValueError(text)
    at = datetime.strptime(text, "%Y-%m-%dT%H:%M:%SZ").replace(tzinfo=UTC)
    return int(at.timestamp()) * MS_PER_S


def _stamp_of(path: Path) -> object:
    status = path.stat()
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def _problem_of(error: OSError | ValueError) -> str:
    return (error.strerror if isinstance(error, OSError) else "") or str(error)


def _digest_of(text: str) -> bytes:
    return hashlib.sha256(text.encode()).digest()


def _check_of(text: str) -> str:
    return _in_letters(zlib.crc32(text.encode()), CHECK_CHARS)


def _in_letters(number: int, chars: int) -> str:
    digits = []
    for _ in range(chars):
        number, digit = divmod(number, len(_ALPHABET))
        digits.append(_ALPHABET[digit])
    return "".join(reversed(digits))
