"""Bookkeeping of a load: what is stored for certain, the file of bad rows, and the state file.

The state file of `load --resume` is a JSON object that is replaced atomically, after what it says
has become true. A load that was killed continues at the position in the file; rows stored beyond it
are stored again, which changes nothing (see `idempotency_key_of`).

The file of `--bad-rows` has a JSON object for each row that is not a pair. A row that is not UTF-8
is in the member `row_base64`. For a row that the server has refused, `row` is its key.
"""

from __future__ import annotations

import asyncio
import json
import os
import struct
import uuid
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, TypeAlias

from shalekv.cli.console.atomic_file import atomic_file
from shalekv.cli.console.keys import Encoding, json_field
from shalekv.cli.load.batches import RowBatch
from shalekv.cli.load.formats import compact_json
from shalekv.cli.load.lines import BadInput, BadRow, InputPosition
from shalekv_client import Durability, ShaleKVError

VERSION = 1
SAVE_INTERVAL_S = 0.5  # a save costs a few syncs of the disk
BEGINNING = "beginning_sha256"  # in an origin

OriginValue: TypeAlias = str | int | bool | None
Origin: TypeAlias = Mapping[str, OriginValue]

_KINDS = {"load_id": str, "origin": dict, "database_id": str, "complete": bool}  # else integers


@dataclass(frozen=True, slots=True)
class _StoredBatch:
    """A stored batch, without its pairs."""

    end: InputPosition
    rows: int
    bad: tuple[BadRow, ...]


@dataclass(slots=True)
class BulkProgress:
    """Progress of a bulk load; the bar reads it in another thread, so each field has one writer."""

    source_bytes: int = 0  # read from the input
    source_bytes_max: int | None = None  # length of the input; None: unknown
    rows: int = 0  # read
    bytes: int = 0  # of the keys and values of these rows
    is_sorted: bool = False  # all rows have been read
    keys: int = 0  # written to files
    file_bytes: int = 0  # of finished files


@dataclass(slots=True)
class Account:
    """Results of a load so far, and the position up to which they are certain."""

    position: InputPosition = field(default_factory=InputPosition)  # rows before: stored, or bad
    rows: int = 0  # acknowledged
    bytes: int = 0  # of acknowledged keys and values
    source_bytes: int = 0  # of the lines of acknowledged rows
    refused: list[tuple[RowBatch, ShaleKVError]] = field(default_factory=list)  # not applied
    unknown: list[tuple[RowBatch, ShaleKVError]] = field(default_factory=list)  # perhaps applied
    cancelled_rows: int = 0  # cancelled in flight, so perhaps applied
    bad_input: BadInput | None = None
    file_error: OSError | None = None  # of a file that the load writes
    certain_rows: int = 0  # rows of this run before `position`
    certain_bad: list[BadRow] = field(default_factory=list)  # bad rows before it, not yet taken
    _next: int = 0  # number of the first batch after `position`
    _ahead: dict[int, _StoredBatch] = field(default_factory=dict)  # stored out of order, by number

    @property
    def rows_ahead(self) -> int:
        """Rows after `position` that are stored as well."""
        return sum(done.rows for done in self._ahead.values())

    @property
    def batches_ahead(self) -> int:
        """Batches after `position` that are stored, and remembered until those before are."""
        return len(self._ahead)

    @property
    def unknown_rows(self) -> int:
        """Rows that may be stored or not."""
        return self.cancelled_rows + sum(len(rows.puts) for rows, _ in self.unknown)

    @property
    def is_good(self) -> bool:
        """Return whether no failure has occurred."""
        return not (self.refused or self.unknown or self.bad_input or self.file_error)

    def failures(self) -> list[tuple[RowBatch, ShaleKVError]]:
        """The batches that were not acknowledged, in the order of their lines."""
        return sorted(self.refused + self.unknown, key=lambda failure: failure[0].first_line)

    def acknowledge(self, rows: RowBatch) -> None:
        """Record that a batch is stored."""
        self.rows += len(rows.puts)
        self.bytes += rows.size_bytes
        self.source_bytes += rows.source_bytes
        self._ahead[rows.number] = _StoredBatch(rows.end, len(rows.puts), tuple(rows.bad))
        while done := self._ahead.pop(self._next, None):
            self._next += 1
            self.position = done.end
            self.certain_rows += done.rows
            self.certain_bad += done.bad

    def take_bad(self) -> list[BadRow]:
        """Take the bad rows before `position` that were not taken yet."""
        taken, self.certain_bad = self.certain_bad, []
        return taken


class BadRowFile:
    """Appends bad rows, in the order of their lines."""

    def __init__(self, path: Path, *, size_bytes: int) -> None:
        """Truncate the file to `size_bytes`, and append from there. Raises OSError."""
        self.path = path
        self._file = path.open("r+b" if size_bytes else "wb")
        found = self._file.seek(0, os.SEEK_END)
        if found < size_bytes:
            self._file.close()
            raise OSError(f"{path} has {found:,} bytes, and it had {size_bytes:,} before")
        self._file.truncate(size_bytes)
        self._file.seek(size_bytes)
        self.size_bytes = size_bytes
        self.count = 0  # rows added since opening

    def add(self, rows: Iterable[BadRow]) -> None:
        """Append rows; `sync` makes them durable."""
        for row in rows:
            members = {"line": row.line, "problem": row.problem}
            text = compact_json(members | json_field("row", row.row, Encoding.TEXT)) + "\n"
            self.size_bytes += self._file.write(text.encode("utf-8", "backslashreplace"))
            self.count += 1

    def sync(self) -> None:
        """Make the added rows durable."""
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Flush and close the file."""
        self._file.close()


class StateMismatch(Exception):
    """The state file is invalid or belongs to another load. The message says what differs."""


@dataclass(frozen=True, slots=True)
class LoadState:
    """The content of a state file."""

    load_id: str  # 16 random bytes in hexadecimal
    origin: Origin  # the input, and how it is read
    database_id: str = ""  # in hexadecimal; empty: not yet bound to a database
    line: int = 0
    offset_bytes: int = 0
    rows: int = 0  # stored
    bad_rows: int = 0  # in the file of --bad-rows
    bad_rows_bytes: int = 0  # the length of that file
    complete: bool = False
    version: int = VERSION

    @property
    def position(self) -> InputPosition:
        """The position at which the load continues."""
        return InputPosition(self.line, self.offset_bytes)

    def at(self, position: InputPosition) -> LoadState:
        """Return a copy with another position."""
        return replace(self, line=position.line, offset_bytes=position.offset_bytes)


def read_state(path: Path, origin: Origin) -> LoadState:
    """Read the state file at `path`; without one, create the state of a new load.

    Raises `StateMismatch` when the state belongs to another input, or to other options.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return LoadState(uuid.uuid4().hex, origin)
    except (OSError, UnicodeDecodeError) as error:
        raise StateMismatch(f"{path} cannot be read: {error}") from None
    state = _parsed(path, text)
    differing = [
        _difference(name, state.origin.get(name), value)
        for name, value in origin.items()
        if state.origin.get(name) != value
    ]
    if differing:
        raise StateMismatch(
            f"{path} belongs to another load: {'; '.join(differing)}. "
            "Remove it to load this input from its beginning"
        )
    return state


def write_state(path: Path, state: LoadState) -> None:
    """Replace the state file atomically and durably. Raises OSError."""
    with atomic_file(path) as file:
        file.write(json.dumps(asdict(state), indent=1).encode() + b"\n")


def bind_to_database(state: LoadState, path: Path, database_id: str) -> LoadState:
    """Bind the state to a database. Raises `StateMismatch` if it is bound to another one."""
    if state.database_id not in {"", database_id}:
        raise StateMismatch(
            f"{path} belongs to a load into the database {state.database_id}, and this server has "
            f"{database_id}. Remove it to load this input from its beginning"
        )
    return replace(state, database_id=database_id)


def idempotency_key_of(state: LoadState, rows: RowBatch, durability: Durability) -> bytes | None:
    """The idempotency key of a batch: equal when the same rows are written again.

    With it, a write of a killed load that is still in flight is either the one that the resumed
    load waits for, or has no effect; it cannot undo later writes of the resumed load. Rows whose
    time to live depends on the clock differ in each run, and have no such key.
    """
    if not state.origin.get("ttl_ms") and any(put.ttl_ms for put in rows.puts):
        return None
    return bytes.fromhex(state.load_id) + struct.pack(
        ">QQIB", rows.first_line, rows.last_line, len(rows.puts), durability.value
    )


def _parsed(path: Path, text: str) -> LoadState:
    try:
        found: Any = json.loads(text)
        known = {one.name for one in fields(LoadState)}
        state = LoadState(**{name: found[name] for name in known})
        uuid.UUID(state.load_id)
        _check_kinds(state)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        raise StateMismatch(f"{path} is not a file that `load --resume` has written") from None
    if state.version != VERSION:
        raise StateMismatch(f"{path} has version {state.version}, and this program reads {VERSION}")
    return state


def _check_kinds(state: LoadState) -> None:
    """Raise `TypeError` for a field whose value has the wrong type."""
    for one in fields(LoadState):
        kind = _KINDS.get(one.name, int)
        if type(getattr(state, one.name)) is not kind:
            raise TypeError(one.name)


def _difference(name: str, was: OriginValue, now: OriginValue) -> str:
    if name == BEGINNING:
        return "its input had another beginning"
    words = ["not given" if value is None else str(value) for value in (was, now)]
    return f"{name} was {words[0]}, and is {words[1]}"


class LoadLedger:
    """Keeps the files of a load up to date: bad rows first, then the state that counts them."""

    def __init__(
        self,
        account: Account,
        *,
        state: LoadState | None = None,
        state_path: Path | None = None,
        bad_rows: BadRowFile | None = None,
    ) -> None:
        """`state` is where the load continues; None, with no path: no state is kept."""
        self.state = state
        self._account = account
        self._state_path = state_path
        self._bad_rows = bad_rows
        self._rows_before = state.rows if state else 0
        self._bad_rows_before = state.bad_rows if state else 0
        self._next_save_s = 0.0
        self._is_saving = False

    @property
    def _keeps_something(self) -> bool:
        return self._state_path is not None or self._bad_rows is not None

    @property
    def bad_rows_count(self) -> int:
        """Number of rows in the file of bad rows."""
        return self._bad_rows_before + (self._bad_rows.count if self._bad_rows else 0)

    async def note(self) -> None:
        """Save the files if due, after an acknowledgement; the saving runs in a thread."""
        now_s = asyncio.get_running_loop().time()
        try:
            self._collect()
            if self._is_saving or now_s < self._next_save_s or not self._keeps_something:
                return
            self._is_saving = True
            await asyncio.to_thread(self._save, self._certain(is_end=False))
        except OSError as error:
            self._account.file_error = error
        self._is_saving = False
        self._next_save_s = asyncio.get_running_loop().time() + SAVE_INTERVAL_S

    def finish(self, *, is_whole: bool) -> None:
        """Save for the last time. REQUIRES: no write is in flight.

        Does nothing if a file could not be written before, which leaves the files consistent.
        """
        if self._account.file_error or not self._keeps_something:
            return
        try:
            self._collect()
            self._save(self._certain(is_end=is_whole))
        except OSError as error:
            self._account.file_error = error

    def _collect(self) -> None:
        """Move bad rows from memory into their file, without a sync."""
        if self._bad_rows is not None:
            self._bad_rows.add(self._account.take_bad())

    def _certain(self, *, is_end: bool) -> LoadState | None:
        """Update and return the state. REQUIRES: the loop's thread, which changes the account."""
        if self.state is None:
            return None
        self.state = replace(
            self.state.at(self._account.position),
            rows=self._rows_before + self._account.certain_rows,
            bad_rows=self.bad_rows_count,
            bad_rows_bytes=self._bad_rows.size_bytes
            if self._bad_rows
            else self.state.bad_rows_bytes,
            complete=is_end,
        )
        return self.state

    def _save(self, state: LoadState | None) -> None:
        if self._bad_rows is not None:
            self._bad_rows.sync()
        if state is not None and self._state_path is not None:
            write_state(self._state_path, state)
