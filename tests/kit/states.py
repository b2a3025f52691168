"""A state to decide by: a dictionary of entries, at one moment."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from shalekv.errors import RangeTooCostly
from shalekv.protocol.entry import NEVER_MS, NO_EXPIRY, Entry, KeyRange, Kind
from shalekv.protocol.transaction import Decision, KeyCount

NOW_MS = 1_000


def entry_of(key: bytes, value: bytes, seq: int, expire_at_ms: int = NO_EXPIRY) -> Entry:
    return Entry(key, seq, Kind.PUT, value, expire_at_ms)


def in_range(keys: KeyRange, key: bytes) -> bool:
    return keys.start <= key and (not keys.end or key < keys.end)


@dataclass(slots=True)
class DictState:
    """Implements `protocol.transaction.State`; entries may be expired, deleted ones are gone."""

    entries: dict[bytes, Entry] = field(default_factory=dict)
    now_ms: int = NOW_MS
    is_costly: bool = False
    found_until_ms: int = NEVER_MS  # stays: no decision of these tests is pending

    def visible(self, key: bytes) -> Entry | None:
        found = self.latest(key)
        return found if found is not None and found.is_visible(self.now_ms) else None

    def latest(self, key: bytes) -> Entry | None:
        return self.entries.get(key)

    def has_keys(self, keys: KeyRange) -> bool:
        if self.is_costly:
            raise RangeTooCostly("too many")
        return any(in_range(keys, key) and self.visible(key) for key in self.entries)

    def count_keys(self, keys: KeyRange) -> KeyCount:
        live = [key for key in self.entries if in_range(keys, key) and self.visible(key)]
        return KeyCount(len(live))

    def apply(self, decision: Decision, seq: int) -> None:
        """Do what was decided: first the ranges go, then come the changes."""
        for keys in decision.deleted:
            for key in [key for key in self.entries if in_range(keys, key)]:
                del self.entries[key]
        for change in decision.changes:
            if change.kind is Kind.PUT:
                entry = entry_of(change.key, change.value, seq, change.expire_at_ms)
                self.entries[change.key] = entry
            else:
                self.entries.pop(change.key, None)

    def values(self) -> Mapping[bytes, tuple[bytes, int]]:
        live = filter(None, map(self.visible, sorted(self.entries)))
        return {entry.key: (entry.value, entry.expire_at_ms) for entry in live}


def state_of(*entries: Entry) -> DictState:
    return DictState({entry.key: entry for entry in entries})


def counter(value: int) -> bytes:
    return value.to_bytes(8, "little", signed=True)
