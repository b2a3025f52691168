"""Who owns the log: the rules of fencing, as pure functions (seed 000, "Writer Protocol").

A writer is named by its epoch, won by compare-and-swap on the manifest, and by a nonce, because
an epoch number can be won twice when a manifest id was recycled (protocol, F2). A slot of
the WAL has one winner for ever (I3); whoever finds a slot taken judges by the winner's epoch and
nonce, never by time.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, replace

from shalekv.errors import Fenced, IllegalState, ManifestVersionExists
from shalekv.protocol.manifest import Manifest
from shalekv.protocol.snapshot import create_snapshot, has_snapshot, remove_snapshots

AIM_SLOTS_MAX = 512  # how far ahead of an older writer fences are put
SEQ_GAP = 1 << 32  # more numbers than one writer can show before one of them is durable


@dataclass(frozen=True, slots=True)
class WriterId:
    """The name of one opening of the database for writing."""

    epoch: int
    nonce: bytes


@dataclass(frozen=True, slots=True)
class Occupant:
    """What stands in a WAL slot: whose it is, and whether it holds nothing (a fence)."""

    owner: WriterId
    is_fence: bool


class SlotVerdict(enum.Enum):
    """What a taken slot means to the writer that wanted it."""

    OURS = "ours"
    OLDER_FENCE = "an older writer's fence"
    OLDER_DATA = "an older writer's data"
    IMPOSTOR = "another writer with our epoch"
    NEWER = "a newer writer"


def judge(occupant: Occupant, own: WriterId) -> SlotVerdict:
    """Outcomes 2 to 4 of the seed's fencing write; outcome 1, success, is `SlotVerdict.OURS`."""
    if occupant.owner == own:
        return SlotVerdict.OURS
    if occupant.owner.epoch > own.epoch:
        return SlotVerdict.NEWER
    if occupant.owner.epoch == own.epoch:
        return SlotVerdict.IMPOSTOR
    return SlotVerdict.OLDER_FENCE if occupant.is_fence else SlotVerdict.OLDER_DATA


@dataclass(frozen=True, slots=True)
class FenceRun:
    """Fences of ours in a row: slots `first` to `first + length - 1`; `width` are needed.

    An older writer has at most `width` objects in flight and takes slots in order, so it must
    meet one of `width` fences in a row before it can pass them (seed 000, "Parallel Writes").

    A fence at or below c is worth nothing: its slot may have been created anew after it was
    collected. The first `proven` ones are fences for ever, wherever c is now (F1).
    """

    first: int
    width: int
    length: int = 0
    proven: int = 0  # a manifest that was read after them showed c below them

    @property
    def next_slot(self) -> int:
        """The slot to try next."""
        return self.first + self.length

    @property
    def is_complete(self) -> bool:
        """Whether no older writer can pass any more."""
        return self.length >= self.width

    def stands_in(self, manifest: Manifest) -> bool:
        """Whether all of them are worth something, by a manifest that was read after them."""
        first_unproven = self.first + self.proven
        is_proven = self.proven == self.length
        return is_proven or first_unproven >= manifest.first_uncompacted_wal_id

    def proven_by(self, manifest: Manifest) -> FenceRun:
        """The run that `stands_in` this manifest; if it does not, another one behind it and c.

        c may be far ahead of an opener that stood still, and nothing below it is worth a fence.
        """
        if self.stands_in(manifest):
            return replace(self, proven=self.length)
        first = max(self.next_slot, manifest.first_uncompacted_wal_id)
        return FenceRun(first=first, width=self.width)

    def after(self, verdict: SlotVerdict, newer_epoch: int, own: WriterId) -> FenceRun:
        """The run after an attempt at `next_slot`.

        Raises `Fenced` (outcome 4) and `IllegalState` (outcome 3).
        """
        match verdict:
            case SlotVerdict.OURS:
                return replace(self, length=self.length + 1)
            case SlotVerdict.OLDER_FENCE | SlotVerdict.OLDER_DATA:
                return FenceRun(first=self.next_slot + 1, width=self.width)
            case SlotVerdict.NEWER:
                raise fenced(own, newer_epoch, f"WAL slot {self.next_slot}")
            case SlotVerdict.IMPOSTOR:
                raise impostor(own, f"WAL slot {self.next_slot}")


@dataclass(frozen=True, slots=True)
class Pursuit:
    """How an opener gets ahead of an older writer that fills slots faster than they are listed.

    Once that has filled more than can have been on its way when we won our epoch, it is alive: the
    next run begins ahead of the first gap, twice as far as the writer has come since the last list.
    """

    gap: int  # the first slot that the last list has shown empty
    first: int  # where the run begins
    alive_from: int  # whoever fills this slot was not done when the first list was sent

    @classmethod
    def begin(cls, gap: int, width: int) -> Pursuit:
        """At the first gap, of writers with so wide a window."""
        return cls(gap, gap, gap + width)

    def after(self, verdict: SlotVerdict, taken: int, gap: int) -> Pursuit:
        """The next aim, when slot `taken` was older; `gap` is by a list that was sent after it.

        The list may lag: that slot counts as filled whatever it shows. A fence is of an opener,
        which ends by itself.
        """
        reached = max(gap, taken + 1)
        if verdict is SlotVerdict.OLDER_FENCE or reached <= self.alive_from:
            return Pursuit(gap, reached, self.alive_from)
        distance = min(2 * (reached - self.gap), AIM_SLOTS_MAX)
        return Pursuit(gap, max(gap + distance, reached), self.alive_from)


def fenced(own: WriterId, newer_epoch: int, seen_at: str) -> Fenced:
    """The error of a writer that met a newer epoch."""
    message = (
        f"this writer (epoch {own.epoch}) was fenced: {seen_at} belongs to epoch {newer_epoch}. "
        "Another writer has taken over the database; send writes to it"
    )
    return Fenced(message, own_epoch=own.epoch, newer_epoch=newer_epoch)


def impostor(own: WriterId, seen_at: str) -> IllegalState:
    """The error of a writer that met its own epoch in other hands."""
    return IllegalState(
        f"{seen_at} was written by another writer with the same epoch {own.epoch}: epochs are won "
        "by compare-and-swap, so the object store must have let two creates of one object succeed. "
        "Stop all writers and check the store"
    )


def loss_of_slot(occupant: Occupant, own: WriterId, seen_at: str) -> Fenced | IllegalState:
    """The error of a writer that serves and met `occupant`, no older fence, in a slot of its own.

    Even an object of ours is an impostor's there: it does not hold the bytes that we sent.
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
            return impostor(own, seen_at)


def check_owner(manifest: Manifest, own: WriterId) -> None:
    """Raise unless `manifest` shows `own` as the current writer.

    An equal epoch with another nonce means that our own edit was made at a recycled manifest id
    and never counted (F2): that writer is fenced just the same.
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


def claim_epoch(
    manifest: Manifest,
    *,
    nonce: bytes,
    max_parallel_writes: int,
    address: str,
    snapshot_expire_time_s: int,
    epoch_min: int = 1,
    since_epoch: int | None = None,
) -> Manifest:
    """The edit that opens a database for writing (protocol, "Epochs and fences").

    The snapshot has the nonce as its id and keeps the WAL while we replay it. `fence_width`
    never shrinks here: the writers that it speaks of are not fenced yet. A claim that is made
    again, because another followed it before it could be seen to count (F2), leaves one snapshot.
    The epoch is not below `epoch_min`: safekeepers may have promised themselves to a higher one.

    Raises `ManifestVersionExists` if another writer has claimed an epoch after `since_epoch`, that
    of the manifest when this opening began. None: it is fenced.
    """
    if since_epoch is not None and manifest.writer_epoch > since_epoch:
        where = f" at {manifest.writer_address}" if manifest.writer_address else ""
        raise ManifestVersionExists(
            f"another writer{where} has opened the database in epoch {manifest.writer_epoch} while "
            "this one was opening it, and keeps it because of --open-once. To start this one again "
            "takes over from it"
        )
    claimed = create_snapshot(manifest, nonce, expire_time_s=snapshot_expire_time_s)
    return replace(
        claimed,
        writer_epoch=max(manifest.writer_epoch + 1, epoch_min),
        writer_nonce=nonce,
        writer_address=address,
        max_parallel_writes=max_parallel_writes,
        fence_width=max(manifest.fence_width, max_parallel_writes),
    )


def first_seq_of_writer(manifest: Manifest, last_seq: int) -> int:
    """The first sequence number that a new writer may issue (I5).

    The writers before it may have shown numbers of writes that were lost from memory. Those lie
    less than 2**32 above the greatest durable number `last_seq`, or above the first number that
    the last of them recorded before it issued any. **departs** from the protocol's "2**32 above
    everything it replayed": two openings in a row without a durable write would share numbers.
    """
    if manifest.writer_first_seq == 0:
        return last_seq + 1  # nobody has served yet, so nothing was shown
    return max(last_seq, manifest.writer_first_seq) + SEQ_GAP


def finish_opening(
    manifest: Manifest,
    own: WriterId,
    *,
    last_wal_id: int | None,
    first_seq: int,
    snapshot_id: bytes,
    snapshot_expire_time_s: int,
) -> Manifest:
    """The edit after fence and replay: only our own uploads can be in flight from here on.

    `last_wal_id` is the last object of the store that was seen; None: there was none.
    The snapshot that kept the WAL for the replay goes; that of the levels that are served comes.
    """
    check_owner(manifest, own)
    seen = [each for each in (last_wal_id, manifest.wal_id_last_seen) if each is not None]
    last_seen = max(seen, default=None)
    edited = replace(
        remove_snapshots(manifest, {own.nonce}),
        fence_width=manifest.max_parallel_writes,
        writer_first_seq=first_seq,
        wal_id_last_seen=last_seen,
    )
    return create_snapshot(edited, snapshot_id, expire_time_s=snapshot_expire_time_s)


def is_opening_finished(manifest: Manifest, own: WriterId, *, snapshot_id: bytes) -> bool:
    """Whether `finish_opening` is contained in `manifest` (F2)."""
    return (
        manifest.writer_nonce == own.nonce
        and manifest.fence_width == manifest.max_parallel_writes
        and not has_snapshot(manifest, own.nonce)
        and has_snapshot(manifest, snapshot_id)
    )


def check_run_counts(run: FenceRun, manifest: Manifest, own: WriterId) -> bool:
    """Whether a complete run fences, by a manifest that was read after its last create.

    Raises as `check_owner`.
    """
    check_owner(manifest, own)
    return run.is_complete and run.stands_in(manifest)
