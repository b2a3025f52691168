"""Fencing: what a taken slot of the WAL means, and which fences stop older writers.

A writer is named by its epoch, which it wins by compare-and-swap on the manifest, and by a nonce,
because an epoch number can be won twice when a manifest id is recycled (F2). A WAL slot has one
winner for ever (I3). A writer that finds a slot taken judges it by the epoch and nonce of the
winner (`judge`), never by time.

These rules are applied in the following places:

- `protocol.opening`: an opener judges each slot that it tries to fence or to fill, and the manifest
  after each of its reads and edits. The order of its steps is described there.
- `protocol.quorum.opening`: the same, in the slot with which it closes the previous log.
- `protocol.log`: a serving writer judges a slot that another writer has taken.
- `store.manifests.WriterManifest`: a writer checks each manifest that it reads or edits, with
  `check_owner`. Edits that only a writer may make check it themselves as well.

Safekeepers compare ballots instead: see `protocol.quorum_records.Ballot`.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, replace

from shalekv.errors import Fenced, IllegalState
from shalekv.protocol.manifest import Manifest

AIM_SLOTS_MAX = 512  # most slots between the first gap and a run that is aimed ahead of it


@dataclass(frozen=True, slots=True)
class WriterId:
    """The name of one opening of the database for writing: an epoch and a random nonce."""

    epoch: int
    nonce: bytes

    @property
    def is_first(self) -> bool:
        """Return whether no other writer has opened the database before."""
        return self.epoch == 1


@dataclass(frozen=True, slots=True)
class Occupant:
    """The object in a WAL slot: its writer, and whether it is a fence (an empty object)."""

    owner: WriterId
    is_fence: bool


@dataclass(frozen=True, slots=True)
class WalListing:
    """The listing of a WAL: which slots are filled."""

    first: int  # where replay begins
    filled: frozenset[int]

    @property
    def first_gap(self) -> int:
        """The first slot from `first` on that is not filled."""
        slot = self.first
        while slot in self.filled:
            slot += 1
        return slot

    def misses_an_object(self, *, width: int | None, last_seen: int | None) -> bool:
        """Return whether an object was lost: the first gap cannot be a slot that was never filled.

        The gap was filled once if it was seen, or if there is an object behind it that no writer
        with `width` objects in flight could have written before it. None: any could.
        """
        gap = self.first_gap
        if last_seen is not None and gap <= last_seen:
            return True
        return width is not None and max(self.filled, default=-1) >= gap + width


class SlotVerdict(enum.Enum):
    """The meaning of a taken slot for the writer that tried to create it."""

    OURS = "ours"
    OLDER_FENCE = "an older writer's fence"
    OLDER_DATA = "an older writer's data"
    DUPLICATE_EPOCH = "another writer with our epoch"
    NEWER = "a newer writer"


def judge(occupant: Occupant, own: WriterId) -> SlotVerdict:
    """Judge a taken slot by the epoch of its owner, then by the nonce, then by its content.

    Our own object counts as success (`SlotVerdict.OURS`): a reply was lost.
    """
    if occupant.owner == own:
        return SlotVerdict.OURS
    if occupant.owner.epoch > own.epoch:
        return SlotVerdict.NEWER
    if occupant.owner.epoch == own.epoch:
        return SlotVerdict.DUPLICATE_EPOCH
    return SlotVerdict.OLDER_FENCE if occupant.is_fence else SlotVerdict.OLDER_DATA


@dataclass(frozen=True, slots=True)
class FenceRun:
    """Our fences in a row: slots `first` to `first + length - 1`; `width` are needed.

    An older writer has at most `width` objects in flight and takes slots in order, so it must
    meet one of `width` fences in a row before it can pass them.

    A fence at or below c (the last compacted slot) does not count: its slot may have been
    collected and created again. The first `proven` fences count for ever, wherever c is now (F1).
    """

    first: int
    width: int
    length: int = 0
    proven: int = 0  # fences that a manifest, read after them, has shown to be above c

    @property
    def next_slot(self) -> int:
        """The slot to try next."""
        return self.first + self.length

    @property
    def is_complete(self) -> bool:
        """Return whether the run is long enough that no older writer can pass it."""
        return self.length >= self.width

    def counts_in(self, manifest: Manifest) -> bool:
        """Return whether all fences so far count.

        REQUIRES: `manifest` was read after they were created.
        """
        first_unproven = self.first + self.proven
        is_proven = self.proven == self.length
        return is_proven or first_unproven >= manifest.first_uncompacted_wal_id

    def proven_by(self, manifest: Manifest) -> FenceRun:
        """Return the run with all its fences proven, or an empty run behind it and behind c.

        The new run is for fences that do not count in `manifest`, which was read after them: c may
        be far ahead of an opener that stalled, and no fence below c counts.
        """
        if self.counts_in(manifest):
            return replace(self, proven=self.length)
        first = max(self.next_slot, manifest.first_uncompacted_wal_id)
        return FenceRun(first=first, width=self.width)

    def after(self, verdict: SlotVerdict, newer_epoch: int, own: WriterId) -> FenceRun:
        """Return the run after an attempt to create a fence in `next_slot`.

        A slot of an older writer restarts the run behind it. Raises `Fenced` for a slot of a newer
        writer, which has `newer_epoch`, and `IllegalState` for a duplicate epoch.
        """
        match verdict:
            case SlotVerdict.OURS:
                return replace(self, length=self.length + 1)
            case SlotVerdict.OLDER_FENCE | SlotVerdict.OLDER_DATA:
                return FenceRun(first=self.next_slot + 1, width=self.width)
            case SlotVerdict.NEWER:
                raise fenced(own, newer_epoch, f"WAL slot {self.next_slot}")
            case SlotVerdict.DUPLICATE_EPOCH:
                raise duplicate_epoch(own, f"WAL slot {self.next_slot}")


@dataclass(frozen=True, slots=True)
class Pursuit:
    """The slot at which the next run begins, after an older writer took a slot of the last run.

    An older writer that is still serving may fill slots faster than an opener lists them. It is
    known to serve once it has filled more slots than it can have had in flight when we won our
    epoch. Then the next run begins ahead of the first gap, by twice the number of slots that this
    writer has filled since the last list, and at most by `AIM_SLOTS_MAX`.
    """

    gap: int  # the first slot that the last list has shown empty
    first: int  # the slot at which the run begins
    alive_from: int  # a writer that fills this slot was still writing when the first list was sent

    @classmethod
    def begin(cls, gap: int, width: int) -> Pursuit:
        """Begin with a run at the first gap; `width` is the widest window of an older writer."""
        return cls(gap, gap, gap + width)

    def after(self, verdict: SlotVerdict, taken: int, gap: int) -> Pursuit:
        """Return where the next run begins, as slot `taken` holds an older writer's object.

        `gap` is the first gap of a list that was sent after that. The list may lag, so slot `taken`
        counts as filled whatever the list shows. An older fence belongs to an opener, which stops
        by itself: it needs no run ahead of the gap.
        """
        reached = max(gap, taken + 1)
        if verdict is SlotVerdict.OLDER_FENCE or reached <= self.alive_from:
            return Pursuit(gap, reached, self.alive_from)
        distance = min(2 * (reached - self.gap), AIM_SLOTS_MAX)
        return Pursuit(gap, max(gap + distance, reached), self.alive_from)


def fenced(own: WriterId, newer_epoch: int, seen_at: str) -> Fenced:
    """Return the error of a writer that met a newer epoch at `seen_at`, an object."""
    message = (
        f"this writer (epoch {own.epoch}) was fenced: {seen_at} belongs to epoch {newer_epoch}. "
        "Another writer has taken over the database; send writes to it"
    )
    return Fenced(message, own_epoch=own.epoch, newer_epoch=newer_epoch)


def duplicate_epoch(own: WriterId, seen_at: str) -> IllegalState:
    """Return the error of a writer that met its own epoch with another writer's nonce."""
    return IllegalState(
        f"{seen_at} was written by another writer with the same epoch {own.epoch}: epochs are won "
        "by compare-and-swap, so the object store must have let two creates of one object succeed. "
        "Stop all writers and check the store"
    )


def lost_slot_error(occupant: Occupant, own: WriterId, seen_at: str) -> Fenced | IllegalState:
    """Return the error of a serving writer that lost the slot `seen_at` to `occupant`.

    REQUIRES: `occupant` is not an older fence, and does not hold the bytes that we sent. So an
    object with our own epoch and nonce is reported as a duplicate epoch, too.
    """
    match judge(occupant, own):
        case SlotVerdict.NEWER:
            return fenced(own, occupant.owner.epoch, seen_at)
        case SlotVerdict.OLDER_DATA:
            return IllegalState(
                f"{seen_at} holds data of the older epoch {occupant.owner.epoch} although that "
                "writer was fenced: objects must have been deleted by hand, or the object store "
                "let two creates of one object succeed. Stop all writers and check the store"
            )
        case _:
            return duplicate_epoch(own, seen_at)


def check_owner(manifest: Manifest, own: WriterId) -> None:
    """Raise `Fenced` unless `manifest` shows `own` as the current writer.

    An equal epoch with another nonce means that our own edit was made at a recycled manifest id
    and never counted (F2): we are fenced as well. Raises `IllegalState` if the epoch went down
    (I5).
    """
    if (manifest.writer_epoch, manifest.writer_nonce) == (own.epoch, own.nonce):
        return
    if manifest.writer_epoch < own.epoch:
        message = (
            f"manifest {manifest.manifest_id} shows writer epoch {manifest.writer_epoch} although "
            f"epoch {own.epoch} was won before: epochs never go down"
        )
        raise IllegalState(message)
    raise fenced(own, manifest.writer_epoch, f"manifest {manifest.manifest_id}")


def run_counts(run: FenceRun, manifest: Manifest, own: WriterId) -> bool:
    """Return whether the run is complete and all its fences count, so that older writers are
    fenced.

    REQUIRES: `manifest` was read after the last fence was created. Raises as `check_owner`.
    """
    check_owner(manifest, own)
    return run.is_complete and run.counts_in(manifest)
