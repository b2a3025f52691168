"""All checks of a store: what each proves, and which guarantee rests on it."""

from __future__ import annotations

from collections.abc import Sequence

from shalekv.protocol.manifest import CasMode
from shalekv.store.verify import listing, moments, races, reads
from shalekv.store.verify.guarantees import (
    DURABLE,
    IN_ORDER,
    NO_GAP,
    NOT_BACK,
    ONE_WINNER,
    TIMELY,
    WHOLE,
)
from shalekv.store.verify.verdict import Check

NATIVE_CHECKS: Sequence[Check] = (
    Check(
        "create-races",
        "of parallel creates of one name exactly one wins, and its bytes stay",
        ONE_WINNER,
        races.create_races,
    ),
    Check(
        "second-create",
        "a create of a name that exists is told so, and replaces nothing",
        ONE_WINNER,
        races.second_create,
    ),
    Check(
        "read-after-write",
        "an object is read by everybody as soon as its create has ended",
        DURABLE,
        reads.read_after_write,
    ),
    Check(
        "read-after-delete",
        "an object is gone as soon as its delete has ended; to delete nothing is no error",
        NOT_BACK,
        reads.read_after_delete,
    ),
    Check(
        "list-after-write",
        "lists show at once what was created, and no more what was deleted",
        NO_GAP,
        listing.list_after_write,
    ),
    Check("list-order", "lists are in the order of the names' bytes", IN_ORDER, listing.order),
    Check(
        "list-start-after",
        "lists begin behind the name they are told",
        IN_ORDER,
        listing.start_after,
    ),
    Check(
        "list-paging",
        "lists of more than 1,000 names are complete, wherever they begin",
        NO_GAP,
        listing.paging,
    ),
    Check("ranged-reads", "ranges are exact at the edges of objects", WHOLE, reads.ranges),
    Check("empty-object", "objects without bytes exist", ONE_WINNER, reads.empty_object),
    Check(
        "large-object",
        "objects as large as SSTs come back whole, and are not replaced",
        WHOLE,
        reads.large_object,
    ),
    Check(
        "store-clock",
        "the store tells its time, by which it dates its objects, and does not go back",
        TIMELY,
        moments.clock,
    ),
    Check(
        "metadata",
        "user metadata is kept, or left out as a whole",
        WHOLE,
        reads.metadata,
    ),
)


def checks_of(mode: CasMode) -> Sequence[Check]:
    """What a store must keep whose creates are decided in this way."""
    if mode is CasMode.NATIVE:
        return NATIVE_CHECKS
    from shalekv.store.verify.two_phase import TWO_PHASE_CHECKS  # noqa: PLC0415 - loads its stores

    return (*NATIVE_CHECKS, *TWO_PHASE_CHECKS)
