"""The simulation finds what it is there to find: bugs planted into the shipped writer.

A planted bug replaces one function of the writer by a plausible wrong one. It counts as caught
when some seed below `SEEDS_MAX` fails; without the bug all of these seeds pass.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest

from shalekv.core import fencing
from shalekv.core.manifest import Manifest
from shalekv.engine import recover
from shalekv.store import claim
from shalekv.store.api import Created, ObjectStore, Unknown
from tests.sim.planting import SEEDS_MAX, Patch, first_failure

_claim_attempt = claim._attempt  # noqa: SLF001 - the planted bugs replace it and fall back to it
_claim_epoch = fencing.claim_epoch


async def unknown_is_success(
    store: ObjectStore, name: str, data: bytes, metadata: Mapping[str, str]
) -> claim.ClaimOutcome:
    """No answer is taken for a yes."""
    outcome = await store.create(name, data, metadata)
    if isinstance(outcome, Created | Unknown):
        return claim.Claimed()
    return await _claim_attempt(store, name, data, metadata)


async def exists_is_a_rival(
    store: ObjectStore, name: str, data: bytes, metadata: Mapping[str, str]
) -> claim.ClaimOutcome:
    """The lost reply of an own success is taken for a rival."""
    outcome = await store.create(name, data, metadata)
    if isinstance(outcome, Created):
        return claim.Claimed()
    return claim.Taken((await store.get(name)).data)


def own_width_only(manifest: Manifest, **arguments: object) -> Manifest:
    """An opener forgets that older writers may have more objects in flight than itself."""
    claimed = _claim_epoch(manifest, **arguments)  # type: ignore[arg-type]
    return replace(claimed, fence_width=claimed.max_parallel_writes)


def next_number(_manifest: Manifest, last_seq: int) -> int:
    """A new writer goes on counting where the log ends."""
    return last_seq + 1


def one_fence_will_do(self: fencing.FenceRun) -> bool:
    """One fence is taken for enough, however many objects may be in flight."""
    return self.length >= 1


BUGS: Mapping[str, Patch] = {
    "an unknown outcome is success": (claim, "_attempt", unknown_is_success),
    "an object that exists is a rival's": (claim, "_attempt", exists_is_a_rival),
    "an opener forgets others' width": (recover, "claim_epoch", own_width_only),
    "numbers go on where the log ends": (recover, "first_seq_of_writer", next_number),
    "one fence for any width": (fencing.FenceRun, "is_complete", property(one_fence_will_do)),
}


@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_is_caught(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each planted bug breaks an invariant, or stops the writer, for some seed."""
    seed = first_failure([BUGS[bug]], monkeypatch)
    assert seed is not None, f"{SEEDS_MAX} seeds did not notice that {bug}"
