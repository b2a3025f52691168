"""I14: what reads of writers have shown, against the order of commits."""

from __future__ import annotations

from tests.kit.model import Version
from tests.sim.errors import Violation
from tests.sim.history import Got, ReadOp
from tests.sim.invariants.catalogue import checks
from tests.sim.serial import SerialOrder


@checks(14, "writers", "database")
def check_i14_reads(order: SerialOrder) -> None:
    """A get shows a version that was durable and not replaced by one acknowledged before it."""
    landed_us = {commit.seq: order.landed_us(commit.wal) for commit in order.commits}
    for read in order.history.reads:
        floor = _floor(order, read)
        versions = order.timeline.between(read.key, floor, read.header_seq)
        for version in versions:
            is_durable = landed_us.get(version.seq, 0) <= read.replied_us
            if is_durable and _shows(order, read, version):
                break
        else:
            problem = f"I14: {read} shows none of {versions} after {floor}"
            raise Violation(problem, at_us=read.replied_us)


@checks(14, "writers", "database")
def check_i14_scans(order: SerialOrder) -> None:
    """A scan shows exactly the state at the number in its header, which was durable."""
    keys = order.timeline.keys
    for scan in order.history.scans:
        first = order.acknowledged_before(scan.invoked_us, epoch=scan.epoch)
        if not first <= scan.header_seq <= order.durable_at(scan.replied_us):
            problem = f"I14: {scan} is of another state than that after {first}"
            raise Violation(problem, at_us=scan.replied_us)
        moments = order.moments(
            keys,
            scan.header_seq,
            epoch=scan.epoch,
            invoked_us=scan.invoked_us,
            replied_us=scan.replied_us,
        )
        states = [{key: moment.got(key) for key in keys} for moment in moments]
        shown = dict.fromkeys(keys, Got()) | dict(scan.entries)
        if shown not in states:
            problem = f"I14: {scan} differs from the log: {states}"
            raise Violation(problem, at_us=scan.replied_us)


def _shows(order: SerialOrder, read: ReadOp, version: Version) -> bool:
    moments = order.moments(
        [read.key],
        version.seq,
        epoch=read.epoch,
        invoked_us=read.invoked_us,
        replied_us=read.replied_us,
    )
    return any(moment.got(read.key) == read.got for moment in moments)


def _floor(order: SerialOrder, read: ReadOp) -> int:
    """What a read must not miss: of this writer, and if it is linearizable of any.

    Of this key alone: of objects that land out of order, a get sees each as soon as it is durable.
    """
    epoch = None if read.is_linearizable else read.epoch
    return order.acknowledged_before(read.invoked_us, epoch=epoch, key=read.key)
