"""The simulation finds what it is there to find: bugs planted into the shipped writer.

A planted bug replaces one function of the writer by a plausible wrong one. It counts as caught
when some seed below `SEEDS_MAX` fails; without the bug all of these seeds pass.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Mapping
from dataclasses import replace

import pytest

from shalekv.core import fencing
from shalekv.core.manifest import Manifest
from shalekv.engine import recover
from shalekv.store import claim
from shalekv.store.api import Created, ObjectStore, Unknown
from tests.sim.invariants import check_all
from tests.sim.run import simulate
from tests.sim.stored import Stored
from tests.sim.workload import rival_writers
from tests.sim.world import World

SEEDS_MAX = 60

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


BUGS: dict[str, tuple[object, str, object]] = {
    "an unknown outcome is success": (claim, "_attempt", unknown_is_success),
    "an object that exists is a rival's": (claim, "_attempt", exists_is_a_rival),
    "an opener forgets others' width": (recover, "claim_epoch", own_width_only),
    "numbers go on where the log ends": (recover, "first_seq_of_writer", next_number),
    "one fence for any width": (fencing.FenceRun, "is_complete", property(one_fence_will_do)),
}


@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_is_caught(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each planted bug breaks an invariant, or stops the writer, for some seed."""
    owner, name, wrong = BUGS[bug]
    monkeypatch.setattr(owner, name, wrong)
    caught = next((seed for seed in range(SEEDS_MAX) if _fails(seed)), None)
    assert caught is not None, f"{SEEDS_MAX} seeds did not notice that {bug}"


def _fails(seed: int) -> bool:
    """Whether the run with this seed fails."""

    async def main(world: World) -> None:
        cluster = await rival_writers(world)
        check_all(cluster.history, Stored.read(world.store))

    with contextlib.redirect_stderr(io.StringIO()):
        try:
            simulate(seed, main)
        except Exception:  # noqa: BLE001 - a violation, a deadlock, or whatever the bug led to
            return True
    return False
