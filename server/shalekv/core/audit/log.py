"""Rules that the slots of the WAL keep along their order (I3, I4).

Epochs of *data* never go down. Fences of an older epoch may stand behind data of a newer one: a
slow opener put them there, and nobody heeds them. Data of an older epoch may stand behind a newer
fence as long as the run of fences was not complete, that is before any newer data.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from operator import attrgetter

from shalekv.protocol.audit import Finding, FindingKind
from shalekv.protocol.manifest import Manifest


@dataclass(frozen=True, slots=True)
class Slot:
    """What the footer of a WAL object says that has to do with its place."""

    wal_id: int
    epoch: int
    nonce: bytes
    min_seq: int
    max_seq: int
    is_fence: bool


class LogAudit:
    """Is shown the slots, in their order, and says what cannot be."""

    def __init__(self, manifest: Manifest) -> None:
        """`manifest` was current when, or before, the slots were read."""
        self._compacted_seq = manifest.last_compacted_seq
        self._first_uncompacted = manifest.first_uncompacted_wal_id
        self._last_seq = 0
        self._data_epoch = 0
        self._nonces: dict[int, bytes] = {manifest.writer_epoch: manifest.writer_nonce}

    def see(self, name: str, slot: Slot) -> Iterator[Finding]:
        """The findings of the next slot, the object `name`."""
        known = self._nonces.setdefault(slot.epoch, slot.nonce)
        if known != slot.nonce:
            problem = f"two writers have the epoch {slot.epoch}: an epoch has one winner"
            yield Finding(name, FindingKind.WAL_EPOCH, problem)
        if slot.is_fence:
            return
        if slot.epoch < self._data_epoch:
            problem = f"data of epoch {slot.epoch} stands behind data of epoch {self._data_epoch}"
            yield Finding(name, FindingKind.WAL_EPOCH, problem)
        self._data_epoch = max(self._data_epoch, slot.epoch)
        if slot.min_seq <= self._last_seq:
            problem = f"begins with {slot.min_seq}, but a slot before it holds {self._last_seq}"
            yield Finding(name, FindingKind.WAL_SEQUENCE, problem)
        self._last_seq = max(self._last_seq, slot.max_seq)
        is_compacted = slot.wal_id < self._first_uncompacted
        if is_compacted and slot.max_seq > self._compacted_seq:
            problem = f"is compacted and holds {slot.max_seq}, above {self._compacted_seq}"
            yield Finding(name, FindingKind.WAL_BOUNDARY, problem)
        if not is_compacted and slot.min_seq <= self._compacted_seq:
            problem = f"is not compacted and holds {slot.min_seq}, not above {self._compacted_seq}"
            yield Finding(name, FindingKind.WAL_BOUNDARY, problem)


def future_epoch(name: str, slot: Slot, manifest: Manifest) -> Iterator[Finding]:
    """Whether the slot is of an epoch that nobody had won; `manifest` was read after the slot."""
    if slot.epoch > manifest.writer_epoch:
        problem = f"is of epoch {slot.epoch}; the manifest knows {manifest.writer_epoch} at most"
        yield Finding(name, FindingKind.WAL_EPOCH, problem)


def missing_slots(
    filled: frozenset[int],
    *,
    first: int,
    width: int,
    last_filled: int | None,
    left_out: Iterable[range] = (),
) -> list[range]:
    """The slots from `first` on that were filled once and are not; those left out never were.

    `last_filled` is a slot that was filled for sure, such as c or the last one seen. A slot that is
    `width` or more below a filled one was filled, too: nobody has more than that many in flight.
    """
    known = -1 if last_filled is None else last_filled
    end = max(known, max(filled, default=-1) - width) + 1
    taken = [range(wal_id, wal_id + 1) for wal_id in filled]
    missing: list[range] = []
    for each in sorted([*taken, *left_out], key=attrgetter("start", "stop")):
        if first < min(each.start, end):
            missing.append(range(first, min(each.start, end)))
        first = max(first, each.stop)
    return [*missing, range(first, end)] if first < end else missing
