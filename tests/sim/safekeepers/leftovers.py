"""I13: safekeepers hold the members that the manifest names, and in the end no others."""

from __future__ import annotations

from collections.abc import Iterator

from shalekv.protocol.manifest import WalMode
from shalekv.protocol.membership import Configuration, Member
from tests.sim.errors import Violation
from tests.sim.invariants.catalogue import checks
from tests.sim.safekeepers.cluster import RETIRE_MS, QuorumCluster
from tests.sim.safekeepers.witness import Witness
from tests.sim.stored import current_manifest

LOOKS = 14  # more than a safekeeper needs to find out that no manifest will name a member
POLL_MS = 1_000.0


async def members_are_those_named(cluster: QuorumCluster) -> None:
    """Wait until nothing is left over, within bounds. REQUIRES: peace, and all machines run."""
    sim = cluster.sim
    end_ms = sim.now_ms + LOOKS * max(RETIRE_MS)
    while sim.now_ms < end_ms and any(_left_over(cluster)):
        await sim.sleep_ms(POLL_MS)
    check_i13_no_member_is_left_over(cluster)
    check_i13_who_is_named_is_there(cluster.witness)


@checks(13, "quorum")
def check_i13_no_member_is_left_over(cluster: QuorumCluster) -> None:
    """Check that safekeepers soon delete members that no manifest names. Raises `Violation`."""
    left = [*_left_over(cluster)]
    if left:
        raise Violation(f"I13: no manifest names {left}, and they are kept for ever")


@checks(13, "quorum")
def check_i13_who_is_named_is_there(witness: Witness) -> None:
    """Check that no safekeeper deletes a member that is named afterwards. Raises `Violation`."""
    if witness.named_late:
        raise Violation(f"I13: a manifest names {witness.named_late[0]}, which was let go of")


def _left_over(cluster: QuorumCluster) -> Iterator[Member]:
    manifest = current_manifest(cluster.sim.store)
    is_quorum = manifest.wal_mode is WalMode.QUORUM
    named = Configuration.of(manifest).everyone if is_quorum else ()
    return (each for each in _held(cluster) if each not in named)


def _held(cluster: QuorumCluster) -> Iterator[Member]:
    for machine in cluster.machines.values():
        assert machine.safekeeper is not None
        yield from machine.members
