"""Session tokens, and the newest state that a client has seen.

With the token of another process, a client reads what that process has written or seen. A token is

    1 byte    1, the version
    16 bytes  the id of the database
    8 bytes   the sequence number, most significant byte first
    4 bytes   the CRC-32 of all before, most significant byte first

and as text URL-safe base64 without padding, 39 characters.
"""

from __future__ import annotations

import struct
import zlib
from base64 import urlsafe_b64decode, urlsafe_b64encode
from binascii import Error as NotBase64
from dataclasses import dataclass
from typing import Self

from shalekv_client.errors import ErrorDetails, WrongDatabase

VERSION = 1
TEXT_LENGTH = 39
DATABASE_ID_BYTES = 16
SEQ_MAX = (1 << 64) - 1
_CONTENT = struct.Struct(">B16sQ")
_CHECKSUM = struct.Struct(">I")
# Does not repeat the text, which may be a secret: an access token in the wrong place.
_OTHER_TEXT = "the text is not a session token, or was changed on its way"


class InvalidToken(ValueError):
    """The text is not a session token, or not one that this version can read."""


@dataclass(frozen=True, slots=True)
class SessionToken:
    """A state of a database. Reads with this token see this state or a newer one.

    `str(token)` is text for a URL, a header or a cookie; `SessionToken.parse` reads it. A token is
    not a secret and grants no access: a forged one can only make reads wait.
    """

    database_id: bytes
    seq: int

    def __post_init__(self) -> None:
        """Check the values. Raises InvalidToken for an id or a number of another size."""
        if len(self.database_id) != DATABASE_ID_BYTES or not 0 <= self.seq <= SEQ_MAX:
            raise InvalidToken("a token has a database id of 16 bytes and a seq of 64 bits")

    def __str__(self) -> str:
        """Return 39 characters of A-Z, a-z, 0-9, - and _."""
        content = _CONTENT.pack(VERSION, self.database_id, self.seq)
        checked = content + _CHECKSUM.pack(zlib.crc32(content))
        return urlsafe_b64encode(checked).rstrip(b"=").decode()

    @classmethod
    def parse(cls, text: str) -> Self:
        """Return the token whose `str` is this text. Raises InvalidToken for other text."""
        try:
            checked = urlsafe_b64decode(text.encode("ascii") + b"=")
        except (NotBase64, UnicodeEncodeError):
            checked = b""
        content, checksum = checked[: _CONTENT.size], checked[_CONTENT.size :]
        if len(text) != TEXT_LENGTH or checksum != _CHECKSUM.pack(zlib.crc32(content)):
            raise InvalidToken(_OTHER_TEXT)
        version, database_id, seq = _CONTENT.unpack(content)
        if version != VERSION:
            raise InvalidToken(f"a session token of version {version}: this client reads {VERSION}")
        token = cls(database_id, seq)
        if str(token) != text:  # base64 has spare bits
            raise InvalidToken(_OTHER_TEXT)
        return token


class Freshness:
    """The newest state of one database that a client has seen; no later read may show less.

    This is the greatest sequence number that no crash can revoke. Reads of level UNCOMMITTED and
    writes of durability MEMORY do not count: waiting for a commit that a crash has revoked would
    never end.
    """

    def __init__(self) -> None:
        """Begin with no state and no database."""
        self.seq = 0
        self.database_id = b""
        self.is_bound = False  # to its database: a token was given, or there are several servers

    def seen(self, seq: int) -> None:
        """Note a commit, reported by a reply or a refusal, that no crash can revoke."""
        self.seq = max(self.seq, seq)

    @property
    def token(self) -> SessionToken | None:
        """The token of this state, for another process; None before the first reply."""
        return SessionToken(self.database_id, self.seq) if self.database_id else None

    def advance(self, token: SessionToken, address: str) -> None:
        """Advance to the state of `token`. Raises `WrongDatabase` for one of another database."""
        if self.database_id and token.database_id != self.database_id:
            message = f"the token is of database {token.database_id.hex()}, and this client talks "
            message += f"to {self.database_id.hex()}: take a token of this one"
            raise WrongDatabase(ErrorDetails(address, "FAILED_PRECONDITION", message))
        self.database_id, self.is_bound = token.database_id, True
        self.seq = max(self.seq, token.seq)

    def note_database(self, database_id: bytes, address: str) -> None:
        """Note that a server has reported another database id than the known one.

        Raises `WrongDatabase` when the client is bound to its database. A client of one address
        without a token begins anew with the database that is there now.
        """
        if not database_id:
            return  # the server does not report its database
        if self.database_id and self.is_bound:
            message = f"the server is of database {database_id.hex()}, and this client, or its "
            message += f"token, of {self.database_id.hex()}: correct the address or the token"
            raise WrongDatabase(ErrorDetails(address, "FAILED_PRECONDITION", message))
        if self.database_id:
            self.seq = 0
        self.database_id = database_id
