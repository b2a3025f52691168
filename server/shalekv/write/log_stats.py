"""Statistics of a log: counts, the stages of its groups, and who is charged for them."""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter_ns

from shalekv.telemetry.activity import CURRENT, STAGES, CommitActivity
from shalekv.telemetry.contained import contained
from shalekv.telemetry.histogram import Histogram
from shalekv.telemetry.metrics import Metrics
from shalekv.telemetry.tracing import Tracer
from shalekv.write.commit import Commit, Group, GroupCharge

_MASK = (1 << 64) - 1


def note_encoded() -> None:
    """Note that the bytes of the group that the running task uploads are made."""
    activity = CURRENT.get()
    if isinstance(activity, CommitActivity):
        activity.encoded_ns = perf_counter_ns()


class LogStats:
    """Counts what a log has made durable, and records the activity of each group."""

    def __init__(self, tracer: Tracer | None = None) -> None:
        """Begin with zeros. `tracer` records the groups of calls that are recorded."""
        self.objects = 0  # with a quorum, of which a record is durable
        self.commits = 0  # that wrote something
        self.bytes = 0  # of these groups, as they are accounted in the queue
        self.last_wal_id: int | None = None  # the object of the last group
        self.stages_us = {stage: Histogram() for stage in STAGES}
        self._stages = [*self.stages_us.values()]
        self.group_commits = Histogram()  # commits of a group that wrote something
        self.group_bytes = Histogram()
        self._tracer = tracer
        self._displaced: list[CommitActivity] = []  # of groups that were queued again

    def add_to(self, metrics: Metrics) -> None:
        """Add the samples of these groups."""
        metrics.add("commits", self.commits)
        metrics.add("commit_bytes", self.bytes)
        metrics.add("wal_objects", self.objects)
        for stage, durations_us in self.stages_us.items():
            metrics.add_histogram("commit_stage_duration_seconds", durations_us, stage)
        metrics.add_histogram("commit_group_commits", self.group_commits)
        metrics.add_histogram("commit_group_bytes", self.group_bytes)

    def begin(self, group: Group, queued_ns: int) -> None:
        """Give a group that was just taken from the queue its activity, queued since `queued_ns`.

        If groups were displaced since the last one, it goes on with theirs: it has their commits.
        """
        activity = CommitActivity(
            perf_counter_ns(),
            wal_id=group.wal_id,
            commit_count=len(group.commits),
            size_bytes=group.size_bytes,
        )
        activity.queued_ns = queued_ns
        if self._displaced:
            for displaced in self._displaced:
                activity.take_over(displaced)
            self._displaced.clear()
        group.activity = activity

    def displace(self, group: Group) -> None:
        """Let the next group go on with the activity of one that was queued again."""
        self._displaced.append(group.activity)

    def stored(self, group: Group) -> None:
        """Note that a group is durable."""
        activity = group.activity
        activity.stored_ns = perf_counter_ns()
        queued, encoded, stored, _ = self._stages
        began_ns, encoded_ns = activity.began_ns, activity.encoded_ns
        queued.add((began_ns - activity.queued_ns) // 1_000)
        if encoded_ns:
            encoded.add((encoded_ns - began_ns) // 1_000)
            stored.add((activity.stored_ns - encoded_ns) // 1_000)

    def visible(self, group: Group) -> None:
        """Note that reads show a group."""
        activity = group.activity
        activity.visible_ns = perf_counter_ns()
        self._stages[-1].add((activity.visible_ns - activity.stored_ns) // 1_000)
        if self._tracer is not None and group.is_acknowledged:
            self._end(group)

    def count(self, group: Group) -> Commit:
        """Count a group that has landed, and return the commit that is charged with it.

        Over many groups, each commit is chosen with the same probability.
        """
        self.objects += group.wal_id != self.last_wal_id
        self.last_wal_id = group.wal_id
        writing = [each for each in group.commits if each.entries or each.writes]
        self.commits += len(writing)
        self.bytes += group.size_bytes
        self.group_commits.add(len(writing))
        self.group_bytes.add(group.size_bytes)
        return writing[0] if len(writing) == 1 else _drawn(writing, group.wal_id)

    def acknowledged(self, group: Group) -> None:
        """Note that the commits of a group are settled."""
        group.is_acknowledged = True
        if self._tracer is not None and group.activity.visible_ns:
            self._end(group)

    def fail(self, group: Group, problem: str) -> None:
        """Note that a group has failed."""
        self._end(group, problem)

    @contained
    def _end(self, group: Group, problem: str = "") -> None:
        if self._tracer is not None:
            self._tracer.end_commit(group.activity, problem)


def charge_of(group: Group, commit: Commit) -> GroupCharge:
    """Build the bill of a group for the commit that is charged with it."""
    first = commit.entries or commit.range_tombstones
    activity = group.activity
    return GroupCharge(activity.sent, first[0].key if first else b"", activity.commit_count)


def _drawn(commits: Sequence[Commit], wal_id: int) -> Commit:
    """Draw one of the commits: a function of the number of their object, like a random one."""
    mixed = ((wal_id + 1) * 0x9E3779B97F4A7C15) & _MASK  # the steps of SplitMix64
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _MASK
    return commits[(mixed ^ (mixed >> 31)) % len(commits)]
