"""Opening a database for writing, as a state machine.

`step(state, event) -> (state, effects)` is pure; `write.opening` carries out its effects. Safety
depends on their order:

1. The epoch is claimed before the WAL is listed. In the manifest with the claim, `fence_width`
   covers the window of every older writer, and a snapshot keeps the WAL for the replay.
2. The WAL is fenced before it is replayed, so that no older writer can add to what is replayed.
3. The manifest is read after the last fence. The fences count only if it still shows this writer,
   and a c below them. A slot up to c may have been filled, compacted and collected before the fence
   was created in it: then an older writer has passed it.
4. The log is replayed before the last edit, which records a first sequence number above all that
   were used, and shrinks `fence_width`: by now all older writers are fenced.

    phase        event                               next phase    effect
    CLAIM        EpochClaimed                        LIST          ListWal
    LIST         WalListed, no object missing        FENCE         CreateFence
                 WalListed, an object missing        RELIST        ListWal
    RELIST       WalListed                           CONFIRM       ReadManifest
    CONFIRM      ManifestRead, still missing         -             raise IllegalState
                 ManifestRead, otherwise             LIST          ListWal
    FENCE        FenceCreated, ours, run incomplete  FENCE         CreateFence
                 FenceCreated, ours, run complete    PROVE         ReadManifest
                 ... and the run is ahead of a gap   LIST_BEFORE   ListWal
                 ... with `proves_each_fence`        PROVE_FENCE   ReadManifest
                 FenceCreated, an older writer's     PURSUE        ListWal
                 FenceCreated, a newer writer's      -             raise Fenced
                 FenceUnknown                        PROVE         ReadManifest
    PROVE_FENCE  ManifestRead                        as FENCE after a fence of ours
    PURSUE       WalListed, the next run at the gap  FENCE         CreateFence
                 WalListed, the next run ahead       RESERVE       ReserveWidth
                 ... and `fence_width` covers it     REREAD        ReadManifest
    RESERVE      ManifestRead                        FENCE         CreateFence
    REREAD       ManifestRead                        FENCE         CreateFence
    LIST_BEFORE  WalListed, slots are empty          FILL          FillSlots
                 WalListed, none is                  PROVE         ReadManifest
    FILL         SlotsFilled                         PROVE         ReadManifest
    PROVE        ManifestRead, the run counts        REPLAY        ReplayLog
                 ManifestRead, it does not           LIST          ListWal
    REPLAY       LogReplayed                         FINISH        FinishOpening
    FINISH       ManifestRead                        SERVE         none

A manifest that shows another writer raises `Fenced` in every phase.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from shalekv.errors import IllegalState, ManifestVersionExists
from shalekv.protocol.fencing import (
    FenceRun,
    Occupant,
    Pursuit,
    SlotVerdict,
    WalListing,
    WriterId,
    check_owner,
    judge,
    run_counts,
)
from shalekv.protocol.manifest import Manifest
from shalekv.protocol.snapshot import create_snapshot, has_snapshot, remove_snapshots

# More sequence numbers than a writer can expose to readers before one of them is durable.
SEQ_GAP = 1 << 32


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
    """Return the manifest that claims the next epoch for a new writer: an opening's first edit.

    A snapshot with the nonce as its id keeps the WAL while it is replayed. `fence_width` never
    shrinks here: the writers with windows that wide are not fenced yet. A claim that is repeated,
    because another edit followed before it could be seen to count (F2), leaves one snapshot.
    The epoch is at least `epoch_min`: safekeepers may have promised a higher one than the manifest
    has.

    With `since_epoch`, the writer epoch of the manifest when this opening began, raises
    `ManifestVersionExists` if another writer has claimed an epoch since. With None, that other
    writer is fenced.
    """
    if since_epoch is not None and manifest.writer_epoch > since_epoch:
        where = f" at {manifest.writer_address}" if manifest.writer_address else ""
        raise ManifestVersionExists(
            f"another writer{where} has opened the database in epoch {manifest.writer_epoch} while "
            "this one was opening it, and this one ends because of --open-once. Starting it again "
            "takes over from the other writer"
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
    """Return the first sequence number that a new writer may issue (I5).

    Earlier writers may have exposed numbers of writes that were then lost from memory. Those are
    less than 2**32 above the greatest durable number `last_seq`, or above the first number that
    the last of these writers recorded in the manifest before it issued any. The record matters:
    with 2**32 above the replayed numbers alone, two openings in a row without a durable write
    would share numbers.
    """
    if manifest.writer_first_seq == 0:
        return last_seq + 1  # no writer has served yet, so no number was exposed
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
    """Return the manifest after fencing and replay: the last edit of an opening.

    From here on only our own uploads can be in flight, so `fence_width` shrinks to our window.
    `last_wal_id` is the last WAL object that was seen in the store, None if there was none.
    The snapshot that kept the WAL for the replay is removed. `snapshot_id` is created: it protects
    the levels of this manifest, from which reads are served. Raises as `check_owner`.
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
    """Return whether `finish_opening` is contained in `manifest` (F2)."""
    return (
        manifest.writer_nonce == own.nonce
        and manifest.fence_width == manifest.max_parallel_writes
        and not has_snapshot(manifest, own.nonce)
        and has_snapshot(manifest, snapshot_id)
    )


class Phase(enum.Enum):
    """The present step of an opening. The transitions are in the table above."""

    CLAIM = "claim an epoch in the manifest"
    LIST = "list the WAL"
    RELIST = "list the WAL again, since an object seems to be missing"
    CONFIRM = "read the manifest after the second list"
    FENCE = "create the next fence"
    PURSUE = "list the WAL behind an older writer that was faster"
    RESERVE = "widen `fence_width` in the manifest, to fence ahead of that writer"
    REREAD = "read the manifest, which is wide enough already"
    PROVE_FENCE = "read the manifest after one fence"
    LIST_BEFORE = "list the slots before a run that is ahead of a gap"
    FILL = "fill the empty ones of them"
    PROVE = "read the manifest after the last fence"
    REPLAY = "replay the log"
    FINISH = "record in the manifest that this writer serves"
    SERVE = "none: the opening is complete"


@dataclass(frozen=True, slots=True)
class EpochClaimed:
    """The edit `claim_epoch` landed; `manifest` contains it."""

    manifest: Manifest


@dataclass(frozen=True, slots=True)
class ManifestRead:
    """`manifest` contains the edit of the effect, or was current after an effect without an edit.

    To be current, a list that was sent after the effect has to show it as the highest (F2).
    """

    manifest: Manifest


@dataclass(frozen=True, slots=True)
class WalListed:
    """Result of a list that was sent after the effect."""

    listing: WalListing


@dataclass(frozen=True, slots=True)
class FenceCreated:
    """Outcome of a create: None for our own object, else what another writer put there."""

    occupant: Occupant | None


@dataclass(frozen=True, slots=True)
class FenceUnknown:
    """The slot was compacted before the store answered: whose object it was is unknown."""


@dataclass(frozen=True, slots=True)
class SlotsFilled:
    """All slots of `FillSlots` are filled: those by other writers, with what they put there."""

    occupants: Sequence[tuple[int, Occupant]]


@dataclass(frozen=True, slots=True)
class LogReplayed:
    """The log was replayed; `last_seq` is its greatest sequence number."""

    last_seq: int


@dataclass(frozen=True, slots=True)
class ReadManifest:
    """List, then read the current manifest. Answered by `ManifestRead`."""


@dataclass(frozen=True, slots=True)
class ListWal:
    """List the WAL from slot `first` on. Answered by `WalListed`."""

    first: int


@dataclass(frozen=True, slots=True)
class CreateFence:
    """Create an empty object in `slot`. Answered by `FenceCreated` or `FenceUnknown`."""

    slot: int


@dataclass(frozen=True, slots=True)
class ReserveWidth:
    """Edit the manifest: `fence_width` at least `width`. Answered by `ManifestRead`."""

    width: int


@dataclass(frozen=True, slots=True)
class FillSlots:
    """Create an empty object in each slot, in any order. Answered by `SlotsFilled`."""

    slots: Sequence[int]


@dataclass(frozen=True, slots=True)
class ReplayLog:
    """Apply the objects of all `slots`, in order. Answered by `LogReplayed`."""

    slots: range


@dataclass(frozen=True, slots=True)
class FinishOpening:
    """Edit the manifest by `finish_opening`. Answered by `ManifestRead`."""

    first_seq: int
    last_wal_id: int | None


OpeningEvent = (
    EpochClaimed
    | ManifestRead
    | WalListed
    | FenceCreated
    | FenceUnknown
    | SlotsFilled
    | LogReplayed
)
OpeningEffect = (
    ReadManifest | ListWal | CreateFence | ReserveWidth | FillSlots | ReplayLog | FinishOpening
)
OpeningStep = tuple["Opening", Sequence[OpeningEffect]]


@dataclass(frozen=True, slots=True)
class Opening:
    """One opening of a database whose WAL is in the object store.

    REQUIRES: the first event is `EpochClaimed`, and each next one answers the last effect.
    """

    nonce: bytes
    phase: Phase = Phase.CLAIM
    manifest: Manifest | None = None  # the newest that was read
    width: int = 0  # of the windows of older writers, when the epoch was claimed
    missing: int = 0  # the slot that seems to have been emptied
    missing_again: int = 0  # the same, by the second list
    run: FenceRun = field(default_factory=lambda: FenceRun(first=0, width=0))
    pursuit: Pursuit = field(default_factory=lambda: Pursuit(0, 0, 0))
    verdict: SlotVerdict = SlotVerdict.OURS  # on the slot before the run, while pursuing
    proves_each_fence: bool = False  # since c passed a run before its last fence was there

    @property
    def known(self) -> Manifest:
        """The newest manifest that was read. REQUIRES: the epoch was claimed."""
        assert self.manifest is not None
        return self.manifest

    @property
    def own(self) -> WriterId:
        """The id of this writer. REQUIRES: the epoch was claimed."""
        return WriterId(self.known.writer_epoch, self.nonce)


def step(state: Opening, event: OpeningEvent) -> OpeningStep:
    """Apply an event; return the next state and what to do next: one effect, none at the end.

    Raises `Fenced` when a newer writer has taken over, and `IllegalState` when the WAL or the
    manifest is not what the protocol allows.
    """
    return _TRANSITIONS[state.phase, type(event)](state, event)


def _claimed(state: Opening, event: EpochClaimed) -> OpeningStep:
    """The widest window of older writers is that of the manifest with the claim."""
    width = event.manifest.fence_width
    return _list(replace(state, manifest=event.manifest, width=width))


def _listed_again(state: Opening, event: WalListed) -> OpeningStep:
    """Remember the first gap; the manifest that is read next says whether it counts."""
    again = replace(state, phase=Phase.CONFIRM, missing_again=event.listing.first_gap)
    return again, [ReadManifest()]


def _fence_unknown(state: Opening, _event: FenceUnknown) -> OpeningStep:
    """The run does not count any more; another one begins behind what is compacted."""
    return replace(state, phase=Phase.PROVE), [ReadManifest()]


def _width_reserved(state: Opening, event: ManifestRead) -> OpeningStep:
    """Begin the run: the manifest shows by now how far ahead of the gap it reaches."""
    return _next_fence(_with_manifest(state, event.manifest))


def _fence_proven(state: Opening, event: ManifestRead) -> OpeningStep:
    """A fence that a manifest shows above c once is a fence for ever (F1)."""
    seen = _with_manifest(state, event.manifest)
    return _next_fence(replace(seen, run=seen.run.proven_by(event.manifest)))


def _listed_before(state: Opening, event: WalListed) -> OpeningStep:
    """Fill what an older writer has left empty before the run: the log has no gaps (I4)."""
    listing = event.listing
    before = range(listing.first_gap, state.run.first)
    empty = [slot for slot in before if slot not in listing.filled]
    if not empty:
        return replace(state, phase=Phase.PROVE), [ReadManifest()]
    return replace(state, phase=Phase.FILL), [FillSlots(empty)]


def _filled(state: Opening, event: SlotsFilled) -> OpeningStep:
    """Judge who else has filled a slot. Raises `Fenced` and `IllegalState`."""
    for slot, occupant in event.occupants:
        verdict = judge(occupant, state.own)
        FenceRun(first=slot, width=1).after(verdict, occupant.owner.epoch, state.own)
    return replace(state, phase=Phase.PROVE), [ReadManifest()]


def _replayed(state: Opening, event: LogReplayed) -> OpeningStep:
    """Record the first sequence number of this writer, and the last slot that it has seen."""
    first_seq = first_seq_of_writer(state.known, event.last_seq)
    finish = FinishOpening(first_seq, state.run.next_slot - 1)
    return replace(state, phase=Phase.FINISH), [finish]


def _finished(state: Opening, event: ManifestRead) -> OpeningStep:
    """Serve."""
    return replace(_with_manifest(state, event.manifest), phase=Phase.SERVE), []


def _with_manifest(state: Opening, manifest: Manifest) -> Opening:
    """Return the state with a newer manifest. Raises as `check_owner`."""
    check_owner(manifest, state.own)
    return replace(state, manifest=manifest)


def _list(state: Opening) -> OpeningStep:
    """List the WAL to find its first gap."""
    return replace(state, phase=Phase.LIST), [ListWal(state.known.first_uncompacted_wal_id)]


def _listed(state: Opening, event: WalListed) -> OpeningStep:
    """Begin a run of fences at the first gap, unless that was filled once (I4)."""
    known, listing = state.known, event.listing
    gap = listing.first_gap
    if listing.misses_an_object(width=known.fence_width, last_seen=known.wal_id_last_seen):
        # A list is read page by page and may be torn: the slot may have been filled since the
        # first page was read, or compacted and collected. A second list and manifest decide.
        again = replace(state, phase=Phase.RELIST, missing=gap)
        return again, [ListWal(known.first_uncompacted_wal_id)]
    run = FenceRun(first=gap, width=state.width)
    return _next_fence(replace(state, run=run, pursuit=Pursuit.begin(gap, state.width)))


def _missing_confirmed(state: Opening, event: ManifestRead) -> OpeningStep:
    """List the WAL again, unless a slot is empty that was filled before."""
    state = _with_manifest(state, event.manifest)
    gap = state.missing
    if state.missing_again == gap and gap >= state.known.first_uncompacted_wal_id:
        raise IllegalState(
            f"wal/{gap:020}.sst is missing although it was written: it must have been deleted by "
            "hand. Put it back, or restore the database from a copy"
        )
    return _list(state)


def _fence_created(state: Opening, event: FenceCreated) -> OpeningStep:
    """Judge the slot of a fence. Raises `Fenced` and `IllegalState`."""
    own, occupant = state.own, event.occupant
    verdict = SlotVerdict.OURS if occupant is None else judge(occupant, own)
    newer_epoch = own.epoch if occupant is None else occupant.owner.epoch
    fenced_on = replace(state, run=state.run.after(verdict, newer_epoch, own), verdict=verdict)
    if verdict is not SlotVerdict.OURS:
        first = max(state.pursuit.gap, state.known.first_uncompacted_wal_id)
        return replace(fenced_on, phase=Phase.PURSUE), [ListWal(first)]
    if state.proves_each_fence:
        return replace(fenced_on, phase=Phase.PROVE_FENCE), [ReadManifest()]
    return _next_fence(fenced_on)


def _next_fence(state: Opening) -> OpeningStep:
    """Create the next fence; of a complete run, fill what is empty before it, or prove it."""
    if not state.run.is_complete:
        return replace(state, phase=Phase.FENCE), [CreateFence(state.run.next_slot)]
    if state.run.first > state.pursuit.gap:
        first = max(state.pursuit.gap, state.known.first_uncompacted_wal_id)
        return replace(state, phase=Phase.LIST_BEFORE), [ListWal(first)]
    return replace(state, phase=Phase.PROVE), [ReadManifest()]


def _pursued(state: Opening, event: WalListed) -> OpeningStep:
    """Begin the next run, ahead of the gap if an older writer is still serving.

    A run ahead of the gap leaves empty slots before it. So the manifest first records a
    `fence_width` that reaches from the gap to the end of the run: processes that read the log do
    not take these slots for lost objects, and a later opener fences this one as well. The manifest
    is edited or read after the gap was listed. So an opener that claims its epoch later finds no
    earlier gap, and its own run covers all slots in which this opener may still create a fence.
    """
    gap, taken = event.listing.first_gap, state.run.first - 1
    pursuit = state.pursuit.after(state.verdict, taken, gap)
    aimed = replace(state, pursuit=pursuit, run=FenceRun(first=pursuit.first, width=state.width))
    reserved = state.width + pursuit.first - pursuit.gap
    if reserved > state.known.fence_width:
        return replace(aimed, phase=Phase.RESERVE), [ReserveWidth(reserved)]
    if pursuit.first > pursuit.gap:
        return replace(aimed, phase=Phase.REREAD), [ReadManifest()]
    return _next_fence(aimed)


def _proven(state: Opening, event: ManifestRead) -> OpeningStep:
    """Replay what is before a run that counts, or begin another one."""
    state = _with_manifest(state, event.manifest)
    if not run_counts(state.run, state.known, state.own):
        return _list(replace(state, proves_each_fence=True))
    slots = range(state.known.first_uncompacted_wal_id, state.run.first)
    return replace(state, phase=Phase.REPLAY), [ReplayLog(slots)]


_TRANSITIONS: Mapping[tuple[Phase, type[OpeningEvent]], Callable[[Opening, Any], OpeningStep]] = {
    (Phase.CLAIM, EpochClaimed): _claimed,
    (Phase.LIST, WalListed): _listed,
    (Phase.RELIST, WalListed): _listed_again,
    (Phase.CONFIRM, ManifestRead): _missing_confirmed,
    (Phase.FENCE, FenceCreated): _fence_created,
    (Phase.FENCE, FenceUnknown): _fence_unknown,
    (Phase.PROVE_FENCE, ManifestRead): _fence_proven,
    (Phase.PURSUE, WalListed): _pursued,
    (Phase.RESERVE, ManifestRead): _width_reserved,
    (Phase.REREAD, ManifestRead): _width_reserved,
    (Phase.LIST_BEFORE, WalListed): _listed_before,
    (Phase.FILL, SlotsFilled): _filled,
    (Phase.PROVE, ManifestRead): _proven,
    (Phase.REPLAY, LogReplayed): _replayed,
    (Phase.FINISH, ManifestRead): _finished,
}
