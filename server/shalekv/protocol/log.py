"""The log of one writer as a state machine: the window of slots, and the durable watermark.

`step(state, event) -> (state, effects)` is pure. `write.group_commit` makes the events and carries
out the effects. A group becomes durable in `write.wal.WriteAheadLog.create`: when its object is in
its slot, or when a majority of safekeepers has its record. What follows from the outcome of that
upload is decided here.

Groups of commits take slots in order. A slot is in flight until the outcome of its upload is known.
The window begins at the first slot in flight, and ends with the last slot that was taken; it is
never wider than `max_parallel_writes`. What is before the window is durable without a gap: the
durable watermark is its end.

A group is acknowledged as soon as it has landed, even if a slot before it is still in flight (a
*gap*). It is not lost then: the next opener puts fences into the gap, and replays what is behind
it. Slots that have landed behind a gap stay in the window.

    mode         event                                next mode  effects
    not STOPPED  GroupTaken                           same       none
    any          SlotFilled by this writer            same       Land, Advance.., Acknowledge
    not STOPPED  SlotFilled by an older fence         same       Advance.., Requeue
    STOPPED      SlotFilled by an older fence         STOPPED    Advance.., Fail
    not STOPPED  SlotFilled by any other object       STOPPED    Refuse, FailQueue, Advance.., Fail
    STOPPED      SlotFilled by any other object       STOPPED    Advance.., Fail
    not STOPPED  UploadFailed                         STOPPED    Refuse, FailQueue, Advance.., Fail
    STOPPED      UploadFailed                         STOPPED    Advance.., Fail
    OPEN         Close                                CLOSING    Refuse
    not STOPPED  Stop                                 STOPPED    Refuse, FailQueue
    any          Abandon                              same       Fail for each slot in flight

There is one `Advance` for each slot that leaves the window, in order. An *older fence* was created
by a slow opener with a lower epoch, which will stop. A second `Close` or `Stop` changes nothing.

Slot order is sequence order (I4). So when another writer's fence displaces a group, all commits
without a slot are renumbered above those that have one (`Requeue`).

A log in safekeepers is *ordered*: its groups become durable in order, none is displaced, and
several may share a WAL object. A newer writer shows there as `UploadFailed` or `Stop` with
`Fenced`.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from shalekv.errors import ShaleError
from shalekv.protocol.fencing import Occupant, SlotVerdict, WriterId, judge, lost_slot_error

SHORTEST_WAIT_MS = 0.001  # less is rounding: a timer of this length may not move the clock


class Mode(enum.Enum):
    """Which commits the log accepts."""

    OPEN = "commits are accepted"
    CLOSING = "no commits are accepted; those in the queue become durable"
    STOPPED = "no commits are accepted, and none is taken from the queue"


class Outcome(enum.Enum):
    """The outcome of an upload."""

    IN_FLIGHT = "not known yet"
    LANDED = "the group is durable"
    LOST = "the slot holds another writer's object, or the group was given up"


@dataclass(frozen=True, slots=True)
class FlushPolicy:
    """Bounds the number, the rate and the size of WAL objects."""

    max_parallel_writes: int  # slots in the window
    interval_ms: float  # minimum spacing of WAL objects
    flush_bytes: int  # queued bytes that override the spacing; maximum of a group


@dataclass(frozen=True, slots=True)
class LogSlot:
    """A place in the log that a group has taken."""

    position: int  # how many groups were taken before
    wal_id: int  # with a quorum, several slots may share an object
    last_seq: int  # the greatest sequence number that the group writes
    is_load: bool  # the group is a load of ready-made SSTs
    outcome: Outcome = Outcome.IN_FLIGHT


@dataclass(frozen=True, slots=True)
class LogState:
    """The log of one writer, from its opening on."""

    own: WriterId
    policy: FlushPolicy
    is_ordered: bool  # groups become durable strictly in their order
    next_wal_id: int  # after the last one that was taken
    next_position: int = 0
    slots: tuple[LogSlot, ...] = ()  # the window: its first slot is in flight
    last_taken_ms: float | None = None  # monotonic time; None: nothing was taken yet
    mode: Mode = Mode.OPEN
    refusal: ShaleError | None = None  # why commits are not accepted

    def with_window(
        self,
        next_wal_id: int,
        next_position: int,
        slots: tuple[LogSlot, ...],
        last_taken_ms: float | None,
    ) -> LogState:
        """Return the state with another window: `replace` would take three times as long."""
        return LogState(
            self.own,
            self.policy,
            self.is_ordered,
            next_wal_id,
            next_position,
            slots,
            last_taken_ms,
            self.mode,
            self.refusal,
        )

    @property
    def in_flight(self) -> list[LogSlot]:
        """The slots whose outcome is not known."""
        return [slot for slot in self.slots if slot.outcome is Outcome.IN_FLIGHT]

    @property
    def landed_behind_gap(self) -> list[LogSlot]:
        """The slots that are durable behind a gap."""
        return [slot for slot in self.slots if slot.outcome is Outcome.LANDED]

    @property
    def takes_dependents(self) -> bool:
        """Return whether a group may contain commits that depend on commits before them.

        Such a commit lands together with all that it depends on, or after it, never without it.
        """
        return self.is_ordered or not self.slots

    def may_take(self, *, writes: bool, depends_on_state: bool, is_load: bool) -> bool:
        """Return whether the commit at the front of the queue may get a slot now.

        The window itself is bounded, not only the number of uploads. So an opener that finds a gap
        knows how far behind it an object can be, and few objects are durable behind a gap.

        A commit that depends on the state before it waits until all of that is durable, unless the
        log is ordered. A load waits until nothing is in flight, and while it is in flight nothing
        else gets a slot: its contents never enter the memtable, so they must be newer than all that
        is there, and older than all that comes later. A commit that writes nothing gets no slot; it
        is answered once all before it is durable.
        """
        if self.mode is Mode.STOPPED:
            return False
        if not self.slots:
            return True
        if len(self.slots) >= self.policy.max_parallel_writes:
            return False
        if any(slot.is_load for slot in self.slots):
            return False
        return writes and not is_load and (self.is_ordered or not depends_on_state)

    def delay_ms(self, *, now_ms: float, queued_bytes: int) -> float:
        """Milliseconds until the queue is to be flushed. REQUIRES: its front may be taken.

        A write that finds the log idle is flushed at once. The interval bounds the cost of a stream
        of writes. A log that is closing does not wait, since no more commits will come.
        """
        policy = self.policy
        is_due = self.mode is not Mode.OPEN or queued_bytes >= policy.flush_bytes
        if self.last_taken_ms is None or is_due:
            return 0.0
        wait_ms = self.last_taken_ms + policy.interval_ms - now_ms
        return wait_ms if wait_ms >= SHORTEST_WAIT_MS else 0.0


@dataclass(frozen=True, slots=True)
class GroupTaken:
    """A group got the next slot, and its upload begins."""

    wal_id: int
    last_seq: int
    is_load: bool
    now_ms: float  # monotonic time


@dataclass(frozen=True, slots=True)
class SlotFilled:
    """The slot is filled: with our group (None), or with another writer's object."""

    position: int
    occupant: Occupant | None


@dataclass(frozen=True, slots=True)
class UploadFailed:
    """An upload ended with `error`, and it is unknown whether the group is durable.

    Examples are a broken disk, a corrupt object in the slot, a slot that may have been compacted
    and filled again, and `Fenced` of a log in safekeepers.
    """

    position: int
    error: ShaleError


@dataclass(frozen=True, slots=True)
class Close:
    """The owner closes the log: queued commits are still written, later ones get `error`."""

    error: ShaleError


@dataclass(frozen=True, slots=True)
class Stop:
    """Nothing more may be written, because of `error`."""

    error: ShaleError


@dataclass(frozen=True, slots=True)
class Abandon:
    """The uploads in flight are given up: their outcome stays unknown."""


@dataclass(frozen=True, slots=True)
class Land:
    """Add the group, which is durable, to the memtable. Slots before it may still be in flight."""

    slot: LogSlot


@dataclass(frozen=True, slots=True)
class Advance:
    """Move the durable watermark to the end of the slot; publish its group if it has landed."""

    slot: LogSlot


@dataclass(frozen=True, slots=True)
class Acknowledge:
    """Settle the commits of the group: they are durable."""

    slot: LogSlot


@dataclass(frozen=True, slots=True)
class Requeue:
    """Return the commits of the group to their place in the queue, and renumber the queue."""

    slot: LogSlot


@dataclass(frozen=True, slots=True)
class Fail:
    """Settle the commits of the group with `error`; None: their outcome is unknown."""

    slot: LogSlot
    error: ShaleError | None


@dataclass(frozen=True, slots=True)
class Refuse:
    """Refuse new commits with `error`."""

    error: ShaleError


@dataclass(frozen=True, slots=True)
class FailQueue:
    """Settle all queued commits, and all calls that wait for the watermark, with `error`."""

    error: ShaleError


LogEvent = GroupTaken | SlotFilled | UploadFailed | Close | Stop | Abandon
LogEffect = Land | Advance | Acknowledge | Requeue | Fail | Refuse | FailQueue
LogStep = tuple[LogState, Sequence[LogEffect]]


def step(state: LogState, event: LogEvent) -> LogStep:
    """Apply an event; return the next state, and what to do, in order.

    REQUIRES: a position is that of a slot in flight, and `GroupTaken` follows `may_take`.
    """
    return _TRANSITIONS[type(event)](state, event)


def _group_taken(state: LogState, event: GroupTaken) -> LogStep:
    slot = LogSlot(state.next_position, event.wal_id, event.last_seq, event.is_load)
    slots = (*state.slots, slot)
    return state.with_window(event.wal_id + 1, slot.position + 1, slots, event.now_ms), []


def _slot_filled(state: LogState, event: SlotFilled) -> LogStep:
    """Judge the object in the slot.

    This is the only place where a serving writer finds the fence of a newer one in the WAL (I1).
    """
    slot = _slot_at(state, event.position)
    occupant = event.occupant
    if occupant is None:
        landed, advances = _settle(state, slot, Outcome.LANDED)
        return landed, [Land(slot), *advances, Acknowledge(slot)]
    if judge(occupant, state.own) is SlotVerdict.OLDER_FENCE:
        displaced, advances = _settle(state, slot, Outcome.LOST)
        if state.mode is Mode.STOPPED:
            return displaced, [*advances, Fail(slot, state.refusal)]
        return displaced, [*advances, Requeue(slot)]
    return _give_up(state, slot, lost_slot_error(occupant, state.own, f"WAL slot {slot.wal_id}"))


def _upload_failed(state: LogState, event: UploadFailed) -> LogStep:
    slot = _slot_at(state, event.position)
    stopped, effects = _stop(state, Stop(event.error))
    lost, advances = _settle(stopped, slot, Outcome.LOST)
    return lost, [*effects, *advances, Fail(slot, None)]


def _close(state: LogState, event: Close) -> LogStep:
    if state.mode is not Mode.OPEN:
        return state, []
    return replace(state, mode=Mode.CLOSING, refusal=event.error), [Refuse(event.error)]


def _stop(state: LogState, event: Stop) -> LogStep:
    if state.mode is Mode.STOPPED:
        return state, []
    stopped = replace(state, mode=Mode.STOPPED, refusal=event.error)
    return stopped, [Refuse(event.error), FailQueue(event.error)]


def _abandon(state: LogState, _event: Abandon) -> LogStep:
    return replace(state, slots=()), [Fail(slot, None) for slot in state.in_flight]


def _give_up(state: LogState, slot: LogSlot, error: ShaleError) -> LogStep:
    """Stop the log because of what another writer put into the slot."""
    stopped, effects = _stop(state, Stop(error))
    lost, advances = _settle(stopped, slot, Outcome.LOST)
    return lost, [*effects, *advances, Fail(slot, error)]


def _slot_at(state: LogState, position: int) -> LogSlot:
    """The slot in flight at `position`: positions in the window follow each other."""
    return state.slots[position - state.slots[0].position]


def _settle(state: LogState, slot: LogSlot, outcome: Outcome) -> tuple[LogState, list[Advance]]:
    """Record the outcome of a slot; return the slots that leave the window, in order."""
    ended = LogSlot(slot.position, slot.wal_id, slot.last_seq, slot.is_load, outcome)
    slots = tuple([ended if each is slot else each for each in state.slots])
    settled = 0
    while settled < len(slots) and slots[settled].outcome is not Outcome.IN_FLIGHT:
        settled += 1
    window = state.with_window(
        state.next_wal_id, state.next_position, slots[settled:], state.last_taken_ms
    )
    return window, [Advance(each) for each in slots[:settled]]


_TRANSITIONS: Mapping[type[LogEvent], Callable[[LogState, Any], LogStep]] = {
    GroupTaken: _group_taken,
    SlotFilled: _slot_filled,
    UploadFailed: _upload_failed,
    Close: _close,
    Stop: _stop,
    Abandon: _abandon,
}
