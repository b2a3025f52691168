"""Header blocks: HPACK (RFC 7541) and the metadata of gRPC.

A `HeaderDecoder` keeps what it has decoded, by the bytes of the block: clients send the same block
for each call of a method, and a lookup costs a hundredth of decoding. A `FieldEncoder` writes the
few fields that we send; those that repeat are put into the dynamic table and cost one byte
afterwards.
"""

from __future__ import annotations

import base64
import binascii
import math
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

from shalekv_wire.fields import ENTRY_OVERHEAD_BYTES, FieldDecoder, Fields
from shalekv_wire.frames import DEFAULT_TABLE_BYTES
from shalekv_wire.status import Metadata, StatusCode
from shalekv_wire.trace_context import REQUEST_ID, TRACEPARENT, UNNAMED, CallNames, call_names

HeadT = TypeVar("HeadT")

# Of the lists of the decoded blocks that a connection keeps: a block of few bytes may refer to
# entries of the dynamic table that have thousands.
KEPT_BYTES_MAX = 32 * 1024
# Of a list, and values of metadata: a block may have a field for each byte, from the dynamic table,
# and a binary field a value for each comma; each of them takes microseconds.
FIELDS_MAX = 128
CONTENT_TYPE = b"application/grpc"
ENCODINGS = ("identity", "gzip")  # of messages
HTTP_OK = 200
# A list that is longer than is allowed is still decoded, up to this multiple: the other headers of
# the connection cannot be decoded without it, and the call then fails alone.
DECODED_FACTOR = 2

_STATIC_NAMES = {b":path": 4, b":authority": 1, b"content-type": 31, b"user-agent": 58}
_STATUS_200 = 8  # of the static table
_FIRST_DYNAMIC = 62
_TABLE_BYTES_MAX = DEFAULT_TABLE_BYTES - 512

_TIMEOUT = re.compile(rb"([0-9]{1,8})([HMSmun])")
_UNIT_S = {b"H": 3_600.0, b"M": 60.0, b"S": 1.0, b"m": 1e-3, b"u": 1e-6, b"n": 1e-9}
_TIMEOUT_NUMBER_MAX = 99_900_000  # of eight digits that are allowed, three are used
_THREE_DIGITS = 100
_LENGTH_DIGITS_MAX = 18  # of a content-length
# Field names of HTTP/2 (RFC 9113, 8.2.1): tokens without upper case.
_NAME = re.compile(rb"[!#$%&'*+\-.^_`|~0-9a-z]+")
# Peers of gRPC send values with a space at an end as they are, against RFC 9113, 8.2.1.
_BAD_VALUE = re.compile(rb"[\x00\r\n]")
_OF_CONNECTION = frozenset(
    [b"connection", b"keep-alive", b"proxy-connection", b"transfer-encoding", b"upgrade"]
)
_RESERVED = frozenset(
    [b"te", b"content-type", b"grpc-timeout", b"grpc-encoding", b"grpc-accept-encoding"]
)
_REQUEST_PSEUDO = frozenset([b":method", b":scheme", b":path", b":authority"])
# Headers of requests without their timeouts, of all connections. Each that names its call is new.
_HEADS_MAX = 1_024
_HEAD_BYTES_MAX = 4 * 1_024  # longer ones are not kept; those with web tokens are
_heads: dict[tuple[tuple[bytes, bytes], ...], RequestHead] = {}
_REQUEST_ID, _TRACEPARENT = REQUEST_ID.encode(), TRACEPARENT.encode()
_PRINTABLE = "".join(map(chr, range(0x20, 0x7F))).replace("%", "")


class Malformed(Exception):
    """A header list that breaks a rule of HTTP/2: a stream error."""


class TooLarge(Exception):
    """A header list that is longer than is allowed."""


@dataclass(slots=True)
class RequestHead:
    """The header of a request. Shared by calls with equal headers, so it must not be changed."""

    path: str = ""
    authority: str = ""
    timeout_s: float | None = None
    metadata: Metadata = ()
    encoding: str = "identity"  # of its messages
    accepts_gzip: bool = False
    content_length: int | None = None
    size_bytes: int = 0  # of the list without its timeout: names, values, and 32 for each field
    http_status: int = (
        HTTP_OK  # other: the request is none of gRPC, and is answered with this status
    )
    problem: str = ""  # with a field; empty: none
    authorization: str = ""  # of the metadata; empty: there is none
    names: CallNames = UNNAMED

    @property
    def is_plain(self) -> bool:
        """Return whether the request can become a call, if there is such a method."""
        return self.http_status == HTTP_OK and not self.problem and self.encoding in ENCODINGS


@dataclass(frozen=True, slots=True)
class ResponseHead:
    """The header or the trailers of a response, or the trailers of a request."""

    http_status: int | None = None
    status: StatusCode | None = None  # None: there is no grpc-status
    message: str = ""
    metadata: Metadata = ()
    encoding: str = "identity"
    content_type: bytes = b""


class HeaderDecoder(Generic[HeadT]):
    """Decodes the header blocks of one direction of a connection, in their order."""

    __slots__ = ("_decoder", "_kept", "_kept_bytes", "_list_bytes_max", "_make")

    def __init__(self, make: Callable[[Fields], HeadT], *, list_bytes_max: int) -> None:
        """`make` builds the result from the fields; it may raise `Malformed`.

        A list is longer than `list_bytes_max` bytes (each field: name, value and 32) at fault.
        """
        self._make = make
        self._list_bytes_max = list_bytes_max
        self._decoder = FieldDecoder(DECODED_FACTOR * list_bytes_max)
        self._kept: dict[bytes, HeadT] = {}
        self._kept_bytes = 0

    def decode(self, block: bytes) -> HeadT:
        """Decode a complete block.

        Raises:
            ConnectionFault: the block cannot be decoded, so no later one can be.
            Malformed: the list breaks a rule of HTTP/2.
            TooLarge: the list is too long for this call.
        """
        head = self._kept.get(block)
        return self._decode(block) if head is None else head

    def decode_fields(self, block: bytes) -> Fields:
        """Decode a block without making a result of it. Raises `ConnectionFault` and `TooLarge`."""
        return self._decode_list(block)[0]

    def _decode_list(self, block: bytes) -> tuple[Fields, int]:
        changes = self._decoder.changes
        fields, size_bytes = self._decoder.decode(block)
        if self._decoder.changes != changes:
            self._forget()  # the meaning of indices has changed
        if size_bytes > self._list_bytes_max:
            raise TooLarge(f"{size_bytes} bytes of metadata, and {self._list_bytes_max} at most")
        if len(fields) > FIELDS_MAX:
            raise TooLarge(f"{len(fields)} fields of metadata, and {FIELDS_MAX} at most")
        return fields, size_bytes

    def _decode(self, block: bytes) -> HeadT:
        changes = self._decoder.changes
        fields, size_bytes = self._decode_list(block)
        head = self._make(fields)
        # A block that changes the table must be decoded each time.
        if self._decoder.changes == changes:
            size_bytes += len(block)
            if self._kept_bytes + size_bytes > KEPT_BYTES_MAX:
                self._forget()
            if size_bytes <= KEPT_BYTES_MAX:
                self._kept[block] = head
                self._kept_bytes += size_bytes
        return head

    def _forget(self) -> None:
        self._kept.clear()
        self._kept_bytes = 0


class FieldEncoder:
    """Encodes the header fields of one direction of a connection."""

    __slots__ = ("_bytes_left", "_indices", "_prefix")

    def __init__(self) -> None:
        """Begin with an empty dynamic table of the default size."""
        self._indices: dict[tuple[bytes, bytes], int] = {}  # -> number of the insertion
        self._bytes_left = _TABLE_BYTES_MAX
        self._prefix = b""  # a change of the table's size, which the next block announces

    def limit_table(self, size_bytes: int) -> bool:
        """Note the table size that the peer allows; returns whether encoded fields are void."""
        if size_bytes >= DEFAULT_TABLE_BYTES or self._bytes_left < 0:
            return False
        self._indices.clear()
        self._bytes_left = -1  # and no use of the table from now on
        self._prefix = b"\x20"
        return True

    def take_prefix(self) -> bytes:
        """Return what the next block must begin with, once."""
        prefix, self._prefix = self._prefix, b""
        return prefix

    @property
    def has_prefix(self) -> bool:
        """Return whether the next block must begin with `take_prefix`."""
        return bool(self._prefix)

    def __len__(self) -> int:
        """Return the number of fields in the dynamic table, which only grows."""
        return len(self._indices)

    def knows(self, name: bytes, value: bytes) -> bool:
        """Return whether the field is in the dynamic table."""
        return (name, value) in self._indices

    def repeated(self, name: bytes, value: bytes) -> bytes:
        """Encode a field that will be sent again: the first time it is added to the table.

        What is added shifts the indices of all others: encoded fields are not to be kept over it.
        """
        number = self._indices.get((name, value))
        if number is not None:
            return _integer(_FIRST_DYNAMIC + len(self._indices) - 1 - number, 7, 0x80)
        size_bytes = len(name) + len(value) + ENTRY_OVERHEAD_BYTES
        if size_bytes > self._bytes_left:
            return literal(name, value)
        self._bytes_left -= size_bytes
        self._indices[name, value] = len(self._indices)
        return _named(name, 6, 0x40) + _string(value)


def literal(name: bytes, value: bytes) -> bytes:
    """Encode a field that is not added to the dynamic table."""
    return _named(name, 4, 0x00) + _string(value)


def _named(name: bytes, prefix_bits: int, pattern: int) -> bytes:
    index = _STATIC_NAMES.get(name)
    if index is not None:
        return _integer(index, prefix_bits, pattern)
    return bytes((pattern,)) + _string(name)


def _string(data: bytes) -> bytes:
    return _integer(len(data), 7, 0) + data


def _integer(number: int, prefix_bits: int, pattern: int) -> bytes:
    limit = (1 << prefix_bits) - 1
    if number < limit:
        return bytes((pattern | number,))
    encoded = bytearray((pattern | limit,))
    number -= limit
    while number >= 0x80:  # noqa: PLR2004 - seven bits a byte, RFC 7541, 5.1
        encoded.append(number & 0x7F | 0x80)
        number >>= 7
    encoded.append(number)
    return bytes(encoded)


def metadata_fields(metadata: Metadata) -> bytes:
    """Encode metadata; binary values (of keys that end with -bin) in base64.

    Raises ValueError as `plain_fields`.
    """
    return b"".join(literal(*field) for field in plain_fields(metadata))


def plain_fields(metadata: Metadata) -> Fields:
    """Return metadata as fields; binary values (of keys that end with -bin) in base64.

    Raises ValueError, which does not repeat the values: a key or a value cannot be sent.
    """
    fields: list[tuple[bytes, bytes]] = []
    for key, value in metadata:
        name = key.encode("ascii")
        data = value if isinstance(value, bytes) else value.encode("latin-1")
        if key.endswith("-bin"):
            data = base64.b64encode(data).rstrip(b"=")
        if not _NAME.fullmatch(name) or _BAD_VALUE.search(data):
            raise ValueError(f"metadata with the key {key!r} cannot be sent")
        fields.append((name, data))
    return tuple(fields)


def list_bytes(metadata: Metadata) -> int:
    """Return the size of metadata as a part of a header list, as settings of HTTP/2 count it."""
    size = 0
    for key, value in metadata:
        value_bytes = len(value)
        if key.endswith("-bin"):
            value_bytes = (value_bytes * 4 + 2) // 3  # base64 without padding
        size += len(key) + value_bytes + ENTRY_OVERHEAD_BYTES
    return size


def status_fields(code: StatusCode, message: str, details: bytes) -> bytes:
    """Encode the trailers of a call."""
    encoded = literal(b"grpc-status", b"%d" % code)
    if message:
        encoded += literal(b"grpc-message", percent_encoded(message))
    if details:
        encoded += metadata_fields([("grpc-status-details-bin", details)])
    return encoded


def percent_encoded(message: str) -> bytes:
    """Encode a message of a status: printable ASCII but "%" stays, each other byte is %XX."""
    from urllib.parse import quote_from_bytes

    encoded = quote_from_bytes(message.encode("utf-8", "replace"), safe=_PRINTABLE)
    inner = encoded.strip(" ")
    if inner != encoded:  # a field neither begins nor ends with a space
        left = len(encoded) - len(encoded.lstrip(" "))
        right = len(encoded) - len(inner) - left
        encoded = "%20" * left + inner + "%20" * right
    return encoded.encode("ascii")


def timeout_field(timeout_s: float) -> bytes:
    """Encode a timeout with three digits: equal blocks are decoded only once.

    It is rounded up, so that the server does not give up before the client.
    """
    number, unit = math.ceil(timeout_s * 1e3), b"m"
    if number < _THREE_DIGITS:
        number, unit = max(math.ceil(timeout_s * 1e6), 1), b"u"
    elif number > _TIMEOUT_NUMBER_MAX:
        number, unit = min(math.ceil(timeout_s), _TIMEOUT_NUMBER_MAX), b"S"
    step = 10 ** max(len(str(number)) - 3, 0)
    return b"%d" % (-(-number // step) * step) + unit


def request_head(fields: Fields) -> RequestHead:
    """Check and convert the header of a request. Raises `Malformed`."""
    timeout: bytes | None = None
    others: list[tuple[bytes, bytes]] = []
    for field in fields:
        if field[0] == b"grpc-timeout":
            timeout = field[1]
        else:
            others.append(field)
    key = tuple(others)
    head = _heads.get(key)
    if head is None:
        head = _request_head(others)
        if head.size_bytes <= _HEAD_BYTES_MAX and head.names is UNNAMED:
            if len(_heads) >= _HEADS_MAX:
                _heads.clear()
            _heads[key] = head
    return head if timeout is None else _with_timeout(head, timeout)


def _with_timeout(head: RequestHead, timeout: bytes) -> RequestHead:
    timeout_s, problem = None, head.problem
    found = _TIMEOUT.fullmatch(timeout)
    if found is None:
        problem = f"the grpc-timeout {timeout!r} is none"
    else:
        timeout_s = int(found[1]) * _UNIT_S[found[2]]
    return RequestHead(
        head.path,
        head.authority,
        timeout_s,
        head.metadata,
        head.encoding,
        head.accepts_gzip,
        head.content_length,
        head.size_bytes,
        head.http_status,
        problem,
        head.authorization,
        head.names,
    )


def _request_head(fields: Fields) -> RequestHead:
    pseudo, regular = _separated(fields, _REQUEST_PSEUDO)
    _check_request(pseudo, regular)
    named = dict(regular)
    is_grpc = named.get(b"content-type", b"").startswith(CONTENT_TYPE)
    http_status = HTTP_OK if is_grpc else 415
    if pseudo[b":method"] != b"POST":
        http_status = 405
    metadata, problem = _metadata_or_problem(regular)
    return RequestHead(
        path=pseudo.get(b":path", b"").decode("latin-1"),
        authority=pseudo.get(b":authority", b"").decode("latin-1"),
        metadata=metadata,
        encoding=named.get(b"grpc-encoding", b"identity").decode("latin-1"),
        accepts_gzip=b"gzip" in named.get(b"grpc-accept-encoding", b""),
        content_length=_content_length(named),
        size_bytes=sum(len(name) + len(value) + ENTRY_OVERHEAD_BYTES for name, value in fields),
        http_status=http_status,
        problem=problem,
        authorization=named.get(b"authorization", b"").decode("latin-1"),
        names=_names(named),
    )


def _names(named: dict[bytes, bytes]) -> CallNames:
    request_id, traceparent = named.get(_REQUEST_ID), named.get(_TRACEPARENT)
    if request_id is None and traceparent is None:
        return UNNAMED
    return call_names((request_id or b"").decode("latin-1"), (traceparent or b"").decode("latin-1"))


def _metadata_or_problem(regular: Fields) -> tuple[Metadata, str]:
    try:
        return _metadata(regular), ""
    except ValueError as error:
        return (), str(error)


def _check_request(pseudo: dict[bytes, bytes], regular: Fields) -> None:
    if b":method" not in pseudo:
        raise Malformed("no :method")
    if pseudo[b":method"] != b"CONNECT" and not (pseudo.get(b":path") and pseudo.get(b":scheme")):
        raise Malformed("no :path, or no :scheme")
    for name, value in regular:
        if name == b"te" and value != b"trailers":
            raise Malformed("te is not trailers")


def response_head(fields: Fields) -> ResponseHead:
    """Check and convert the header or the trailers of a response. Raises `Malformed`."""
    pseudo, regular = _separated(fields, frozenset([b":status"]))
    named = dict(regular)
    try:
        http_status = int(pseudo[b":status"]) if pseudo else None
        metadata = _metadata(regular)
        status = _status_code(int(named[b"grpc-status"])) if b"grpc-status" in named else None
    except ValueError as error:
        raise Malformed(str(error)) from None
    return ResponseHead(
        http_status=http_status,
        status=status,
        message=_percent_decoded(named.get(b"grpc-message", b"")),
        metadata=metadata,
        encoding=named.get(b"grpc-encoding", b"identity").decode("latin-1"),
        content_type=named.get(b"content-type", b""),
    )


def trailers_of_request(fields: Fields) -> None:
    """Check the trailers of a request, which gRPC does not use. Raises `Malformed`."""
    _separated(fields, frozenset())


def _status_code(number: int) -> StatusCode:
    try:
        return StatusCode(number)
    except ValueError:
        return StatusCode.UNKNOWN


def _percent_decoded(message: bytes) -> str:
    if not message:
        return ""
    from urllib.parse import unquote_to_bytes

    return unquote_to_bytes(message).decode("utf-8", "replace")


def _content_length(named: dict[bytes, bytes]) -> int | None:
    length = named.get(b"content-length")
    if length is None:
        return None
    if not length.isdigit() or len(length) > _LENGTH_DIGITS_MAX:
        raise Malformed(f"the content-length {length!r} is none")
    return int(length)


def _separated(fields: Fields, allowed: frozenset[bytes]) -> tuple[dict[bytes, bytes], Fields]:
    """Return the pseudo-header fields and the others. Raises `Malformed`."""
    pseudo: dict[bytes, bytes] = {}
    regular: list[tuple[bytes, bytes]] = []
    for name, value in fields:
        if name.startswith(b":"):
            if name not in allowed or name in pseudo or regular:
                raise Malformed(f"the pseudo-header {name!r} is unknown, twice, or late")
            pseudo[name] = value
        else:
            if not _NAME.fullmatch(name) or name in _OF_CONNECTION:
                raise Malformed(f"the header name {name!r}")
            regular.append((name, value))
        if _BAD_VALUE.search(value):
            raise Malformed(f"the value of {name!r}")
    return pseudo, regular


def _metadata(regular: Iterable[tuple[bytes, bytes]]) -> Metadata:
    """Return what is metadata of the caller, decoded. Raises ValueError and `TooLarge`."""
    metadata: list[tuple[str, str | bytes]] = []
    for name, value in regular:
        if name in _RESERVED or name in (b"grpc-status", b"grpc-message"):
            continue
        key = name.decode("ascii")
        if key.endswith("-bin"):
            if len(metadata) + value.count(b",") >= FIELDS_MAX:
                raise TooLarge(f"more than {FIELDS_MAX} values of metadata")
            metadata += [(key, _from_base64(key, each)) for each in value.split(b",")]
        else:
            metadata.append((key, value.decode("latin-1")))
    return tuple(metadata)


def _from_base64(key: str, value: bytes) -> bytes:
    try:
        return base64.b64decode(value + b"=" * (-len(value) % 4), validate=True)
    except binascii.Error:
        raise ValueError(f"the value of {key} is not in base64") from None
