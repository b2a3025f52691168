"""Sentences in which records are written, disks fail, members change and objects are archived."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace

import pytest

from shalekv import errors
from shalekv.protocol import fencing, membership
from shalekv.protocol.fencing import FenceRun, SlotVerdict
from shalekv.protocol.manifest import WalMode
from shalekv.protocol.membership import Member
from shalekv.protocol.quorum import proposer
from shalekv.protocol.quorum_records import Append, Elected, Record
from tests.scenarios.quorum.openings import NODE, NODES, WRITER, fills, sentence
from tests.scenarios.quorum.stage import Stage
from tests.sim.quorum.safekeeper import complete, trim

PAYLOADS = r"(?P<payloads>[a-z](?: [a-z])*)"

# --- writing --------------------------------------------------------------------------------------


@sentence(r"safekeepers (?P<names>[A-F](?: [A-F])*)")
def safekeepers(stage: Stage, names: str) -> None:
    stage.begin(names.split())


@sentence(rf"{WRITER} writes {PAYLOADS}(?P<ending>, and leaves the object open)? to {NODES}")
def writes(stage: Stage, writer: str, payloads: str, ending: str | None, nodes: str) -> None:
    """The others are not reached; these acknowledge. Each record is an object, or all share one."""
    _append(stage, writer, payloads, shares_object=ending is not None)
    fills(stage, writer, nodes)


@sentence(rf"{WRITER} writes {PAYLOADS} to nobody")
def writes_alone(stage: Stage, writer: str, payloads: str) -> None:
    _append(stage, writer, payloads, shares_object=False)


@sentence(rf"{WRITER} writes {PAYLOADS} to {NODE}, which has not flushed it yet")
def writes_unflushed(stage: Stage, writer: str, payloads: str, node: str) -> None:
    _append(stage, writer, payloads, shares_object=False)
    it = stage.writer(writer)
    stream = stage.stream(it, node)
    if not any(isinstance(each, Append) for each in stream.there):
        it.send(stream)
    while stream.there:
        stage.deliver(stream)
    stage.nodes[node].work()


def _append(stage: Stage, writer: str, payloads: str, *, shares_object: bool) -> None:
    it = stage.writer(writer)
    for payload in payloads.split():
        last = it.log.last
        wal_id = last.next_wal_id if last.ends_object else last.wal_id
        record = it.append(wal_id or 0, payload.encode(), ends_object=not shares_object)
        stage.records[payload] = record


@sentence(rf"{PAYLOADS} (?:is|are) acknowledged")
def is_acknowledged(stage: Stage, payloads: str) -> None:
    for payload in payloads.split():
        assert _is_committed(stage, stage.records[payload]), f"{payload} is not"


@sentence(rf"{PAYLOADS} (?:is|are) in flight")
def is_in_flight(stage: Stage, payloads: str) -> None:
    for payload in payloads.split():
        assert not _is_committed(stage, stage.records[payload]), f"{payload} is acknowledged"


def _is_committed(stage: Stage, record: Record) -> bool:
    known = stage.judge.committed.get(record.lsn)
    return known is not None and known.record == record


@sentence(rf"{WRITER} is gone")
def is_gone(stage: Stage, writer: str) -> None:
    stage.writer(writer).ended = "gone"


@sentence(rf"{WRITER} has stopped: (?P<why>.+)")
def has_stopped(stage: Stage, writer: str, why: str) -> None:
    assert why in stage.writer(writer).ended


@sentence(rf"{WRITER} connects to {NODE} again")
def connects_again(stage: Stage, writer: str, node: str) -> None:
    """Connect anew; messages on the former stream stay on their way."""
    stage.ask(stage.connect(stage.writer(writer), node))


@sentence(rf"what {WRITER} sent {NODE} before arrives")
def arrives_late(stage: Stage, writer: str, node: str) -> None:
    for stream in stage.writer(writer).streams:
        if stream.member.address == node and not stream.is_open:
            while stream.there:
                stage.deliver(stream)
    stage.nodes[node].sync()


# --- disks ----------------------------------------------------------------------------------------


@sentence(rf"(?:power is lost at|crash) {NODES}")
def power_is_lost(stage: Stage, nodes: str) -> None:
    for node in nodes.split():
        stage.nodes[node].crash()
        stage.hang_up(node)


@sentence(rf"power is lost at {NODE}, and tears record (?P<lsn>\d)")
def tears(stage: Stage, node: str, lsn: str) -> None:
    assert int(lsn) in stage.nodes[node].disk.cached
    power_is_lost(stage, node)
    stage.nodes[node].disk.stored[int(lsn)] = None


@sentence(
    rf"power is lost at {NODE} while it cuts its log for {WRITER}; record (?P<lsn>\d) is gone"
)
def interrupted(stage: Stage, node: str, writer: str, lsn: str) -> None:
    stream = stage.stream(stage.writer(writer), node)
    assert isinstance(stream.there[0], Elected)
    stage.deliver(stream)
    power_is_lost(stage, node)
    stage.nodes[node].disk.empty([int(lsn)], int(lsn) - 1)


@sentence(rf"{NODES} starts?")
def starts(stage: Stage, nodes: str) -> None:
    for node in nodes.split():
        stage.nodes[node].start()
        stage.judge.started(node, stage.nodes[node].disk.base, stage.nodes[node].readable())


@sentence(rf"record (?P<lsn>\d) of {NODE} goes bad")
def goes_bad(stage: Stage, lsn: str, node: str) -> None:
    """Its bytes have changed on the disk. REQUIRES: the process does not run."""
    stage.nodes[node].damage(int(lsn))


@sentence(rf"{NODE} loses its disk, and is admitted as another member")
def loses_its_disk(stage: Stage, node: str) -> None:
    stage.hang_up(node)
    stage.nodes[node].wipe(stage.new_id())


@sentence(rf"the disks of {NODES} are copied")
def are_copied(stage: Stage, nodes: str) -> None:
    """Try a backup where there is nothing to back up."""
    for node in nodes.split():
        stage.copies[node] = deepcopy(stage.nodes[node].disk)


@sentence(rf"the old copies are put in the place of the disks of {NODES}")
def are_restored(stage: Stage, nodes: str) -> None:
    stage.judge.is_majority_lost = True
    for node in nodes.split():
        stage.hang_up(node)
        stage.nodes[node].crash()
        stage.nodes[node].disk = deepcopy(stage.copies[node])
        stage.nodes[node].start()


@sentence(rf"{NODE} is (?P<health>sound|damaged|refilling)")
def is_healthy(stage: Stage, node: str, health: str) -> None:
    state = stage.nodes[node].state
    assert state is not None
    assert state.health.value == health


@sentence(rf"{NODE} holds (?P<trimmed>\.\.\. ?)?(?P<committed>[^|]*)\|(?P<in_flight>[^|]*)")
def holds(stage: Stage, node: str, trimmed: str | None, committed: str, in_flight: str) -> None:
    """Compare the log: archived only, committed as far as the member knows, and in flight."""
    it = stage.nodes[node]
    assert it.state is not None
    records = it.readable()
    known = it.state.committed_lsn - it.state.log.base.lsn
    found = [f"{each.epoch}.{each.payload.decode()}" for each in records]
    assert found == (committed + in_flight).split()
    assert known == len(committed.split()), f"{known} of them are committed as it knows"
    assert (it.state.log.base.lsn > 0) == (trimmed is not None)


# --- the archive ----------------------------------------------------------------------------------


@sentence(rf"{NODES} archives?(?P<nothing> nothing)?")
def archives(stage: Stage, nodes: str, nothing: str | None) -> None:
    """Archive all that it may, one after the other; objects of others are created again, too."""
    for node in nodes.split():
        found = complete(stage.nodes[node])
        before = dict(stage.judge.archive)
        for each, records in found:
            stage.judge.put(node, each.wal_id, records)
        assert (before == stage.judge.archive) == (nothing is not None)


@sentence(rf"{NODES} (?:is|are) trimmed")
def is_trimmed(stage: Stage, nodes: str) -> None:
    for node in nodes.split():
        assert trim(stage.nodes[node], stage.bucket), "there is nothing to drop"


@sentence(r"the archive holds (?P<objects>.+)")
def archive_holds(stage: Stage, objects: str) -> None:
    wanted = [[f"{each};" for each in text.split()] for text in objects.split(",")]
    archive = stage.judge.archive
    behind = {each.stop for each in stage.bucket.manifest.wal_ids_left_out}
    assert all(wal_id - 1 in archive for wal_id in archive if wal_id and wal_id not in behind)
    found = [archive[wal_id].decode() for wal_id in sorted(archive)]
    assert found == list(map("".join, wanted))


# --- members --------------------------------------------------------------------------------------


@sentence(rf"the members are to be {NODES}")
def members_are_to_be(stage: Stage, nodes: str) -> None:
    """The first edit of a change. Nodes that are not there yet are admitted."""
    for node in nodes.split():
        if node not in stage.nodes:
            stage.add_node(node)
    members = [stage.nodes[node].member for node in nodes.split()]
    stage.bucket.edit(lambda manifest: membership.begin_change(manifest, members))


@sentence(r"the change is cancelled")
def is_cancelled(stage: Stage) -> None:
    stage.bucket.edit(membership.cancel_change)


@sentence(rf"{WRITER} looks at the manifest")
def polls_manifest(stage: Stage, writer: str) -> None:
    """Poll the manifest: from now on it asks the members named there."""
    stage.writer(writer).reconfigure(stage.bucket.manifest)


@sentence(rf"{WRITER} may(?P<no> not)? end the change")
def may_end(stage: Stage, writer: str, no: str | None) -> None:
    """Compare whether it may end the change, by what it knows of the next members."""
    leader = stage.writer(writer).leader
    assert leader is not None
    assert leader.may_finish_change == (no is None)


@sentence(rf"{WRITER} ends the change(?:: (?P<error>\w+))?")
def ends(stage: Stage, writer: str, error: str | None) -> None:
    edit = stage.writer(writer).finish_change
    if error is None:
        stage.bucket.edit(edit)
    else:
        with pytest.raises(getattr(errors, error)):
            stage.bucket.edit(edit)


@sentence(rf"the members are {NODES}")
def members_are(stage: Stage, nodes: str) -> None:
    manifest = stage.bucket.manifest
    addresses = [Member.parse(text).address for text in manifest.wal_members]
    assert (addresses, manifest.wal_members_next) == (nodes.split(), ())


# --- the other mode -------------------------------------------------------------------------------


@sentence(r"a database with its WAL in the object store")
def in_the_object_store(stage: Stage) -> None:
    stage.begin((), mode=WalMode.OBJECT_STORE)


@sentence(
    rf"{WRITER} puts (?P<payload>[a-z]+) into the object store(?P<taken>: its slot is taken)?"
)
def puts(stage: Stage, writer: str, payload: str, taken: str | None) -> None:
    """It creates the object that follows the last that it has seen, if there is none."""
    it = stage.writer(writer)
    slot = it.slot
    is_taken = slot in stage.judge.archive
    assert is_taken == (taken is not None)
    if not is_taken:
        stage.judge.archive[slot] = f"{writer}.{payload};".encode()
        it.slot += 1


@sentence(rf"{WRITER} switches the database to (?P<where>.+?)(?:: (?P<error>\w+))?")
def switches(stage: Stage, writer: str, where: str, error: str | None) -> None:
    """The edit of the manifest, or why it fails."""
    edit = _to_object_store if where == "the object store" else _to_safekeepers
    if error is None:
        edit(stage, writer, where)
    else:
        with pytest.raises(getattr(errors, error)):
            edit(stage, writer, where)


def _to_object_store(stage: Stage, writer: str, _where: str) -> None:
    leader = stage.writer(writer).leader
    assert leader is not None
    tip = stage.bucket.archive_tip
    stage.bucket.edit(lambda manifest: proposer.leave_quorum(manifest, leader, tip))


def _to_safekeepers(stage: Stage, writer: str, where: str) -> None:
    it = stage.writer(writer)
    nodes = [stage.add_node(name) for name in where.removeprefix("safekeepers ").split()]
    run = stage.runs.get(writer, FenceRun(first=it.slot, width=1))
    if not fencing.run_counts(run, stage.bucket.manifest, it.own):
        raise errors.IllegalState("its opening goes on until its fences count")
    members = [node.member for node in nodes]
    stage.bucket.edit(lambda m: proposer.enter_quorum(m, it.own, members, run.next_slot - 1))
    stage.judge.first_ids.add(stage.bucket.manifest.first_uncompacted_wal_id)


@sentence(r"the log is compacted")
def is_compacted(stage: Stage) -> None:
    """All that is in the object store."""
    last = max(stage.judge.archive)
    stage.bucket.edit(lambda manifest: replace(manifest, wal_id_last_compacted=last))


@sentence(rf"{WRITER} opens in the object store")
def opens_in_the_object_store(stage: Stage, writer: str) -> None:
    """Claim the epoch of its number, and continue behind the last object; no fence yet."""
    it = stage.writer(writer)
    stage.bucket.claim(int(writer), it.nonce)
    it.claimed(int(writer), stage.bucket.manifest)
    it.slot = len(stage.judge.archive)


@sentence(rf"{WRITER} lists the object store")
def lists(stage: Stage, writer: str) -> None:
    """It finds the first slot that is free."""
    it = stage.writer(writer)
    while it.slot in stage.judge.archive:
        it.slot += 1


@sentence(rf"{WRITER} fences in the object store")
def fences(stage: Stage, writer: str) -> None:
    """Create an empty object in the slot of the former writer."""
    it = stage.writer(writer)
    run = FenceRun(first=it.slot, width=stage.bucket.manifest.fence_width)
    puts(stage, writer, "fence", None)
    stage.runs[writer] = run.after(SlotVerdict.OURS, 0, it.own).proven_by(stage.bucket.manifest)
