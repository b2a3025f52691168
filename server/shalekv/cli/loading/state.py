"""The state file of `load --resume`: up to where which input is stored for certain, and where.

It is a JSON object that is replaced whole, after what it says is true. A load that was killed goes
on at the place that the file has; what was stored beyond it is stored again, which changes
nothing: see `write_key`.
"""

from __future__ import annotations

import json
import struct
import uuid
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, TypeAlias

from shalekv.cli.console.atomic_file import whole_file
from shalekv.cli.load.batches import Rows
from shalekv.cli.load.lines import Position
from shalekv_client import Durability

VERSION = 1

OriginValue: TypeAlias = str | int | bool | None
Origin: TypeAlias = Mapping[str, OriginValue]

BEGINNING = "beginning_sha256"  # in an origin

_KINDS = {"load_id": str, "origin": dict, "database_id": str, "complete": bool}  # else numbers


class StateMismatch(Exception):
    """The state file belongs to another load, or is none. Says what differs."""


@dataclass(frozen=True, slots=True)
class LoadState:
    """What the file says."""

    load_id: str  # 16 random bytes in hexadecimal
    origin: Origin  # the input, and how it is read
    database_id: str = ""  # in hexadecimal; empty: no server was asked yet
    line: int = 0
    offset_bytes: int = 0
    rows: int = 0  # that are stored
    bad_rows: int = 0  # that are in the file of --bad-rows
    bad_rows_bytes: int = 0  # the length of that file
    complete: bool = False
    version: int = VERSION

    @property
    def position(self) -> Position:
        """Where the load goes on."""
        return Position(self.line, self.offset_bytes)

    def at(self, position: Position) -> LoadState:
        """The same at another position."""
        return replace(self, line=position.line, offset_bytes=position.offset_bytes)


def read_state(path: Path, origin: Origin) -> LoadState:
    """The state at `path`, or that of a new load if there is none.

    Raises `StateMismatch` when it belongs to another input, or to other options.
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
    """Replace the file, durably; raises OSError."""
    with whole_file(path) as file:
        file.write(json.dumps(asdict(state), indent=1).encode() + b"\n")


def bound_to(state: LoadState, path: Path, database_id: str) -> LoadState:
    """The state for a load into this database; raises `StateMismatch` if it is of another."""
    if state.database_id not in {"", database_id}:
        raise StateMismatch(
            f"{path} belongs to a load into the database {state.database_id}, and this server has "
            f"{database_id}. Remove it to load this input from its beginning"
        )
    return replace(state, database_id=database_id)


def write_key(state: LoadState, rows: Rows, durability: Durability) -> bytes | None:
    """The idempotency key of a batch: the same when the same rows are written again.

    So a write of a killed load that is still on its way is either the one that the resumed load
    waits for, or comes to nothing; it cannot undo what the resumed load writes later. Rows whose
    time to live depends on the clock are not the same again, and have no such key.
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
    """Raise `TypeError` where a field has a value of another kind than a fresh state."""
    for one in fields(LoadState):
        kind = _KINDS.get(one.name, int)
        if type(getattr(state, one.name)) is not kind:
            raise TypeError(one.name)


def _difference(name: str, was: OriginValue, now: OriginValue) -> str:
    if name == BEGINNING:
        return "its input began otherwise"
    words = ["not given" if value is None else str(value) for value in (was, now)]
    return f"{name} was {words[0]}, and is {words[1]}"
