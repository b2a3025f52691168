r"""The audit log: a line of JSON for each operation, appended to a file or to standard error.

    {"time":"2026-03-01T12:00:00.125Z","role":"writer","epoch":3,"principal":"token:alice",
     "peer":"ipv4:10.0.0.7:53124","request_id":"a1","method":"KV.Put","verb":"write",
     "keys":["9f86d081884c7d65"],"key_count":1,"outcome":"ok","seq":17,"duration_ms":1.25,
     "request_bytes":64,"reply_bytes":29}\n                                (one line in the file)

A line has at most `LINE_BYTES_MAX` bytes: of many keys it shows the first few, and of a long text
the beginning, with "..." after it. It has no values, tokens, page tokens and idempotency keys.

Lines of operations that were refused for who calls are written at once, others before the event
loop waits again. Of one origin, a principal or the address of a caller without one, refusals have
`REFUSALS_SHOWN` lines within `REFUSALS_TIME_MS`; those that are left out are counted, and have one
line together when the time is over, or at the end. So nobody can fill the disk, or a pipe, by being
refused.
"""

from __future__ import annotations

import asyncio
import math
import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from hashlib import blake2b
from itertools import chain, islice
from json.encoder import encode_basestring_ascii
from typing import Any, TypeAlias

from google.protobuf.message import DecodeError, Message

from shalekv.clock import Clock
from shalekv.errors import (
    OutcomeUnknown,
    PermissionDenied,
    ShaleError,
    Unauthenticated,
)
from shalekv.protocol.access import Verb
from shalekv.server.access.audit_file import AuditFile
from shalekv.server.access.authenticator import network_of
from shalekv.settings import AccessSettings, AuditKeys, AuditLevel
from shalekv.telemetry.slow_calls import NamedCall
from shalekv.v1 import admin_pb2 as admin
from shalekv.v1 import kv_pb2 as kv

LINE_BYTES_MAX = 4_096  # as much as a pipe takes whole, whoever else writes to it
KEYS_SHOWN_MAX = 8
KEY_SHOWN_BYTES_MAX = 128
PREFIX_BYTES = 8
HASH_BYTES = 16
KEYS_CHARS_MAX = 1_600  # of all keys of a line
TEXT_CHARS_MAX = 256  # of each other text
# 10 show what an origin tries. With 32 addresses strangers make 363 lines a minute: some 150 MB a
# day, at most 2.1 GB, for as long as they go on.
REFUSALS_SHOWN = 10
REFUSALS_TIME_MS = 60_000.0
ADDRESSES_MAX = 32  # of callers without a principal; the others are one origin
PRINCIPALS_MAX = 1_000  # as well; strangers cannot make them
OTHERS = "*"  # the name of an origin of many

_HEADER_TAG = b"\x0a"  # of the header in a reply, its first field
_LENGTH_MAX = 0x7F  # of one byte
_TEXT_CHARS = 6  # that JSON makes of a character, at most: \u0000
_CONTROL = {number: f"\\x{number:02x}" for number in (*range(32), 127)}

_SECRET_OF_PROCESS = os.urandom(HASH_BYTES)  # before there is one of a policy
_Key: TypeAlias = bytes | kv.KeyRange
Outcome: TypeAlias = Message | bytes | BaseException | None


# What operations do, and from which level on they have lines. All others are reads of the status.
_METHODS: Mapping[type[Message], tuple[str, Verb, AuditLevel]] = {
    kv.GetRequest: ("KV.Get", Verb.READ, AuditLevel.ALL),
    kv.BatchGetRequest: ("KV.BatchGet", Verb.READ, AuditLevel.ALL),
    kv.CountRequest: ("KV.Count", Verb.READ, AuditLevel.ALL),
    kv.ScanRequest: ("KV.Scan", Verb.READ, AuditLevel.ALL),
    kv.WatchCreate: ("KV.Watch", Verb.WATCH, AuditLevel.ALL),
    kv.PutRequest: ("KV.Put", Verb.WRITE, AuditLevel.WRITES),
    kv.DeleteRequest: ("KV.Delete", Verb.WRITE, AuditLevel.WRITES),
    kv.DeleteRangeRequest: ("KV.DeleteRange", Verb.DELETE_RANGE, AuditLevel.WRITES),
    kv.WriteRequest: ("KV.Write", Verb.WRITE, AuditLevel.WRITES),
    kv.TxnRequest: ("KV.Txn", Verb.WRITE, AuditLevel.WRITES),
    admin.IngestSstRequest: ("Admin.IngestSst", Verb.INGEST, AuditLevel.WRITES),
    admin.StatsRequest: ("Admin.Stats", Verb.ADMIN, AuditLevel.ADMIN),
    admin.ListSlowCallsRequest: ("Admin.ListSlowCalls", Verb.ADMIN, AuditLevel.ADMIN),
    admin.ProfileRequest: ("Admin.Profile", Verb.ADMIN, AuditLevel.ADMIN),
    admin.CreateSnapshotRequest: ("Admin.CreateSnapshot", Verb.ADMIN, AuditLevel.ADMIN),
    admin.RenewSnapshotRequest: ("Admin.RenewSnapshot", Verb.ADMIN, AuditLevel.ADMIN),
    admin.ListSnapshotsRequest: ("Admin.ListSnapshots", Verb.ADMIN, AuditLevel.ADMIN),
    admin.DeleteSnapshotRequest: ("Admin.DeleteSnapshot", Verb.ADMIN, AuditLevel.ADMIN),
    admin.GetAccessPolicyRequest: ("Admin.GetAccessPolicy", Verb.ADMIN, AuditLevel.ADMIN),
    admin.SetAccessPolicyRequest: ("Admin.SetAccessPolicy", Verb.ADMIN, AuditLevel.ADMIN),
}
_DENIALS = (Unauthenticated, PermissionDenied)  # refused for who calls
_CHANGES = frozenset(kind for kind, row in _METHODS.items() if row[2] is not AuditLevel.ALL)
_LEVELS = list(AuditLevel)
_OPENINGS = (kv.SessionRequest, kv.WatchRequest)  # of streams, whose operations have lines


class AuditEntry:
    """An operation that gets a line at its end."""

    __slots__ = ("_began_ms", "_changes", "_head", "_log", "_request_bytes", "sent_bytes")

    def __init__(
        self, log: AuditLog, head: str, request_bytes: int, began_ms: float, *, changes: bool
    ) -> None:
        """`head` is what is known of the operation when it begins; `changes` if it is no read."""
        self._log = log
        self._changes = changes
        self._head = head
        self._request_bytes = request_bytes
        self._began_ms = began_ms
        self.sent_bytes = 0  # of a stream of replies, so far

    def end(self, outcome: Outcome) -> None:
        """Write the line. The outcome is the reply, or the error; None: a stream has ended."""
        sent_bytes = self.sent_bytes
        if isinstance(outcome, bytes):
            sent_bytes = len(outcome)
        elif isinstance(outcome, Message):
            sent_bytes = outcome.ByteSize()
        tail = f',"request_bytes":{self._request_bytes},"reply_bytes":{sent_bytes}}}\n'
        text = _described(outcome, changes=self._changes)
        self._log.write(self._head, text, tail, self._began_ms, outcome)


class _Origin:
    """Refusals of one origin, within a time that ends."""

    __slots__ = ("ends_ms", "first", "last", "name", "outcomes", "shown", "verbs")

    def __init__(self, name: str, ends_ms: float) -> None:
        """`name` is its part of a line."""
        self.name = name
        self.ends_ms = ends_ms
        self.shown = 0
        self.first = self.last = ""  # the times of what was left out
        self.outcomes: Counter[str] = Counter()  # of what was left out
        self.verbs: Counter[str] = Counter()

    def leave_out(self, time_text: str, outcome: str, verb: str) -> None:
        """Count a refusal that gets no line."""
        self.first = self.first or time_text
        self.last = time_text
        self.outcomes[outcome] += 1
        if verb:
            self.verbs[verb] += 1

    def told(self) -> str:
        """Return the rest of the line of what was left out."""
        verbs = f',"verbs":{{{_counted(self.verbs)}}}' if self.verbs else ""
        return (
            f'{self.name},"outcome":"left_out","count":{self.outcomes.total()}'
            f',"first":"{self.first}","last":"{self.last}"'
            f',"outcomes":{{{_counted(self.outcomes)}}}{verbs}}}\n'
        )


class _Origins:
    """The origins of refusals of the last minute: a bounded number."""

    def __init__(self) -> None:
        """Know none."""
        self._principals: dict[str, _Origin] = {}
        self._addresses: dict[str, _Origin] = {}

    def of(self, call: NamedCall, now_ms: float) -> _Origin:
        """Return the origin of a call."""
        if call.principal:
            known, name, places = self._principals, call.principal, PRINCIPALS_MAX
            kind = ',"principal"'
        else:
            known, name, places = self._addresses, network_of(call.peer), ADDRESSES_MAX
            kind = ',"principal":"","peer"'
        if name not in known and len(known) >= places:
            name = OTHERS
        origin = known.get(name)
        if origin is None:
            told = f"{kind}:{_text(name)}"
            origin = known[name] = _Origin(told, now_ms + REFUSALS_TIME_MS)
        return origin

    def take(self, now_ms: float) -> Iterator[_Origin]:
        """Forget those whose time is over, and yield them."""
        for known in (self._principals, self._addresses):
            for name, origin in [*known.items()]:
                if now_ms >= origin.ends_ms:
                    yield known.pop(name)


class AuditLog:
    """Notes operations, as the settings of a process say."""

    def __init__(self, settings: AccessSettings, file: AuditFile, clock: Clock, role: str) -> None:
        """`role` is that of this process, such as `writer`."""
        self.file = file
        level = _LEVELS.index(settings.audit_level)
        self._notes_all = settings.audit_level is AuditLevel.ALL
        self._noted = frozenset(
            kind for kind, (_, _, first) in _METHODS.items() if level >= _LEVELS.index(first)
        )
        self._clock = clock
        self._role = role
        self._epoch: Callable[[], int] = int
        self._shown: Callable[[bytes], str] = _SHOWN.get(settings.audit_keys, _plain)
        self._hashes_keys = settings.audit_keys is AuditKeys.HASHED
        self._secret = b""
        self._second, self._second_text = 0, ""
        self._origins = _Origins()
        self.use_secret(_SECRET_OF_PROCESS)

    def use_secret(self, secret: bytes) -> None:
        """Hash keys with what follows from this secret; empty: go on as before.

        It is that of the policy, and so the same in all processes; before there is one, each has
        its own.
        """
        if self._hashes_keys and secret and secret != self._secret:
            self._secret = secret
            self._shown = partial(_hashed, _hash_key(secret))

    def enter_term(self, epoch: Callable[[], int]) -> None:
        """Note the epoch that `epoch` returns from now on."""
        self._epoch = epoch

    def notes(self, request_type: type[Message]) -> bool:
        """Return whether operations with such requests have lines, even if they are allowed."""
        return request_type in self._noted or (self._notes_all and request_type not in _OPENINGS)

    def begin(self, call: NamedCall, request: Message, request_bytes: int) -> AuditEntry:
        """Note that an operation begins; a watch, which may never end, has a line for that."""
        began_ms = self._clock.monotonic_ms()
        head, changes = self._head(call, request), type(request) in _CHANGES
        if isinstance(request, kv.WatchCreate):
            tail = f',"request_bytes":{request_bytes}}}\n'
            self.write(head, ',"outcome":"begun"', tail, began_ms, None)
        return AuditEntry(self, head, request_bytes, began_ms, changes=changes)

    def refuse(
        self,
        call: NamedCall,
        request: Message | None,
        size_bytes: int | None,
        error: BaseException,
    ) -> None:
        """Write the line of an operation that did not begin.

        One that was refused for who calls has a line at each level, and at once. Without a size
        nothing is known of the request but its type, and without a request not even that. If its
        origin had many, it is counted for the next `sum_up`.
        """
        is_denied = isinstance(error, _DENIALS)
        if not is_denied and (request is None or not self.notes(type(request))):
            return
        origin = self._origins.of(call, self._clock.monotonic_ms())
        if origin.shown >= REFUSALS_SHOWN:
            verb = "" if request is None else _method_of(type(request))[1]
            origin.leave_out(self._time(), _outcome_of(error, changes=False), verb)
            return
        origin.shown += 1
        head = self._head(call, request, is_known=size_bytes is not None)
        tail = "}\n" if size_bytes is None else f',"request_bytes":{size_bytes}}}\n'
        text = _described(error, changes=False)
        self.write(head, text, tail, self._clock.monotonic_ms(), error)

    def write(self, head: str, outcome: str, tail: str, began_ms: float, result: Outcome) -> None:
        """Write a line from its parts."""
        seq = _seq_of(result)
        known = f',"seq":{seq}' if seq else ""
        duration_ms = max(self._clock.monotonic_ms() - began_ms, 0.0)
        rest = f'{head}{outcome}{known},"duration_ms":{duration_ms:.3f}{tail}'
        self._append(rest, is_urgent=isinstance(result, _DENIALS))

    def sum_up(self) -> None:
        """Write a line for each origin whose time is over, if lines of it were left out."""
        self._sum_up(self._clock.monotonic_ms())

    def close(self) -> None:
        """Write the lines of all that was left out, before the file is closed."""
        self._sum_up(math.inf)

    def _sum_up(self, now_ms: float) -> None:
        for origin in self._origins.take(now_ms):
            if origin.outcomes:
                self._append(origin.told(), is_urgent=True)

    def _append(self, rest: str, *, is_urgent: bool) -> None:
        begin = f'{{"time":"{self._time()}","role":"{self._role}","epoch":{self._epoch()}'
        self.file.append(f"{begin}{rest}".encode("ascii"), is_urgent=is_urgent)

    def _time(self) -> str:
        now_ms = self._clock.wall_ms() or 0
        second, rest_ms = divmod(now_ms, 1_000)
        if second != self._second or not self._second_text:
            self._second = second
            self._second_text = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(second))
        return f"{self._second_text}.{rest_ms:03d}Z"

    def _head(self, call: NamedCall, request: Message | None, *, is_known: bool = True) -> str:
        parts = [
            f',"principal":{_text(call.principal)},"peer":{_text(call.peer)}',
            f',"request_id":{_text(call.request_id)}' if call.request_id else "",
            f',"trace_id":"{call.trace_id}"' if call.trace_id else "",
        ]
        if request is not None:
            method, verb = _method_of(type(request))
            parts.append(f',"method":"{method}"')
            parts.append(f',"verb":"{verb}"' if verb else "")
            parts.extend(self._subjects(request) if is_known else ())
        return "".join(parts)

    def _subjects(self, request: Message) -> Iterator[str]:
        """Yield what an operation is about: keys, ranges, or the name of something else."""
        count, named = _named(request)
        if count:
            keys, ranges = self._shown_keys(named)
            yield f',"keys":[{",".join(keys)}]' if keys else ""
            yield f',"ranges":[{",".join(ranges)}]' if ranges else ""
            yield f',"key_count":{count}'
        name = _name_of(request)
        yield f',"object":{_text(name)}' if name else ""

    def _shown_keys(self, named: Iterable[_Key]) -> tuple[list[str], list[str]]:
        keys: list[str] = []
        ranges: list[str] = []
        left = KEYS_CHARS_MAX
        for each in islice(named, KEYS_SHOWN_MAX):
            text = self._key(each) if isinstance(each, bytes) else self._range(each)
            left -= len(text)
            if left < 0 and (keys or ranges):
                break
            (keys if isinstance(each, bytes) else ranges).append(text)
        return keys, ranges

    def _key(self, key: bytes) -> str:
        return encode_basestring_ascii(self._shown(key))

    def _range(self, keys: kv.KeyRange) -> str:
        if keys.prefix:
            return f'{{"prefix":{self._key(keys.prefix)}}}'
        start = self._key(keys.start) if keys.start else '""'
        end = self._key(keys.end) if keys.end else '""'
        return f'{{"start":{start},"end":{end}}}'


def _method_of(request_type: type[Message]) -> tuple[str, str]:
    found = _METHODS.get(request_type)
    if found is not None:
        return found[0], found[1].value
    name = request_type.DESCRIPTOR.name.removesuffix("Request")
    return f"{'KV' if request_type in _OPENINGS else 'Admin'}.{name}", ""


def _outcome_of(outcome: Outcome, *, changes: bool) -> str:
    """Return the name of an outcome.

    Of what `changes` something, a cancelled call or a bug leaves unknown whether it did.
    """
    match outcome:
        case Unauthenticated():
            return "unauthenticated"
        case PermissionDenied():
            return "denied"
        case OutcomeUnknown():
            return "unknown"
        case ShaleError():
            return "error"
        case BaseException():
            return "unknown" if changes else "error"
    return "ok"


def _described(outcome: Outcome, *, changes: bool) -> str:
    """Return the outcome, and the reason if it is an error."""
    name = _outcome_of(outcome, changes=changes)
    if not isinstance(outcome, BaseException) or isinstance(outcome, _DENIALS):
        return f',"outcome":"{name}"'
    reason = outcome.reason if isinstance(outcome, ShaleError) else ShaleError.reason
    if isinstance(outcome, asyncio.CancelledError):
        reason = "CANCELLED"
    return f',"outcome":"{name}","reason":"{reason}"'


def _counted(counts: Counter[str]) -> str:
    """Return the members of an object in JSON; the names need no escapes."""
    return ",".join(f'"{name}":{count}' for name, count in sorted(counts.items()))


def _seq_of(outcome: Outcome) -> int:
    """Return the sequence number in the header of a reply; 0: there is none."""
    if isinstance(outcome, bytes):
        # The header is the first field, and shorter than 128 bytes: one byte has its length.
        if outcome[:1] != _HEADER_TAG or outcome[1] > _LENGTH_MAX:
            return 0
        try:
            return kv.ReplyHeader.FromString(outcome[2 : 2 + outcome[1]]).seq
        except DecodeError:
            return 0
    header = getattr(outcome, "header", None)
    return header.seq if isinstance(header, kv.ReplyHeader) else 0


def _text(text: str) -> str:
    """Return a text in JSON; of a long one the beginning."""
    encoded: str = encode_basestring_ascii(text[: TEXT_CHARS_MAX + 1])
    if len(encoded) <= TEXT_CHARS_MAX:
        return encoded
    return encode_basestring_ascii(text[: TEXT_CHARS_MAX // _TEXT_CHARS] + "...")


def _plain(key: bytes) -> str:
    r"""Return a key as text: \ for a backslash, \xNN for bytes that are not printable UTF-8."""
    shown = key[:KEY_SHOWN_BYTES_MAX].replace(b"\\", rb"\\")
    text = shown.decode("utf-8", "backslashreplace").translate(_CONTROL)
    return text + "..." if len(key) > KEY_SHOWN_BYTES_MAX else text


def _prefix(key: bytes) -> str:
    return _plain(key) if len(key) <= PREFIX_BYTES else _plain(key[:PREFIX_BYTES]) + "..."


def hash_of_key(secret: bytes, key: bytes) -> str:
    """Return what lines have in the place of a key; the secret is that of the policy, or empty."""
    return _hashed(_hash_key(secret or _SECRET_OF_PROCESS), key)


def first_key(request: Message) -> bytes:
    """Return the first key that a request names, or the beginning of its range; empty: none."""
    first = next(iter(_named(request)[1]), b"")
    return first if isinstance(first, bytes) else first.prefix or first.start


def _hash_key(secret: bytes) -> bytes:
    return blake2b(secret, person=b"shalekv audit").digest()


def _hashed(hash_key: bytes, key: bytes) -> str:
    return blake2b(key, key=hash_key, digest_size=HASH_BYTES).hexdigest()


_SHOWN: Mapping[AuditKeys, Callable[[bytes], str]] = {
    AuditKeys.PLAIN: _plain,
    AuditKeys.PREFIX: _prefix,
}


def _named(request: Message) -> tuple[int, Iterable[_Key]]:
    """Return the number of keys and ranges that a request names, and what they are."""
    match request:
        case kv.GetRequest() | kv.PutRequest() | kv.DeleteRequest():
            return 1, (request.key,)
        case kv.BatchGetRequest():
            return len(request.keys), request.keys
        case kv.DeleteRangeRequest() | kv.ScanRequest() | kv.CountRequest() | kv.WatchCreate():
            return 1, (request.range,)
        case kv.WriteRequest():
            return len(request.changes), map(_changed, request.changes)
        case kv.TxnRequest():
            count = len(request.compares) + len(request.then) + len(request.otherwise)
            operations = chain(request.then, request.otherwise)
            return count, chain(map(_compared, request.compares), map(_operated, operations))
        case admin.IngestSstRequest():
            spans = (kv.KeyRange(start=sst.first_key, end=sst.last_key) for sst in request.ssts)
            return len(request.ssts), spans
    return 0, ()


def _changed(change: kv.Change) -> _Key:
    kind = change.WhichOneof("change")
    if kind is None:
        return b""
    changed: Any = getattr(change, kind)
    key: _Key = changed.range if kind == "delete_range" else changed.key
    return key


def _compared(compare: kv.Compare) -> _Key:
    return compare.range_empty if compare.WhichOneof("test") == "range_empty" else compare.key


def _operated(operation: kv.TxnOperation) -> _Key:
    is_get = operation.WhichOneof("operation") == "get"
    return operation.get.key if is_get else _changed(operation.change)


def _name_of(request: Message) -> str:
    """Return the name of what a request is about, if that is no key; empty: it has none."""
    match request:
        case admin.CreateSnapshotRequest():
            return request.name
        case admin.RenewSnapshotRequest() | admin.DeleteSnapshotRequest():
            return request.name or request.id.hex()
        case admin.IngestSstRequest():
            return request.load_id
        case admin.SetAccessPolicyRequest():
            return f"version {request.policy.version}"
        case kv.WatchCreate():
            return request.consumer
    return ""
