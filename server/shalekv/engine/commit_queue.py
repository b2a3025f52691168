"""The queue of the log: commits that have no slot yet, in the order of their submission."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from operator import attrgetter

from shalekv.write.commit import Commit

_PLACE = attrgetter("place")


class CommitQueue:
    """Commits in order, and the bytes that they hold."""

    def __init__(self) -> None:
        """An empty queue."""
        self._commits: deque[Commit] = deque()
        self.size_bytes = 0

    def __len__(self) -> int:
        return len(self._commits)

    def __iter__(self) -> Iterator[Commit]:
        return iter(self._commits)

    def has_to_wait(self, *, is_ordered: bool) -> bool:
        """Whether the front has to wait until all before it is durable.

        `is_ordered`: nothing lands without what was taken before it. Even then a load waits, since
        it stands above all that memory holds, and what writes nothing is only to be answered.
        """
        if not self._commits:
            return False
        front = self._commits[0]
        if is_ordered and front.load is None:
            return not front.writes
        return front.rests_on_state or not front.writes

    def append(self, commit: Commit) -> None:
        """A new commit, behind all others."""
        self._commits.append(commit)
        self.size_bytes += commit.size_bytes

    def pop_decided(self) -> Commit | None:
        """The front of the queue, if it writes nothing."""
        if not self._commits or self._commits[0].writes:
            return None
        commit = self._commits.popleft()
        self.size_bytes -= commit.size_bytes
        return commit

    def take(self, bytes_max: int, *, is_alone: bool) -> list[Commit]:
        """The front of the queue: at least one commit, and no more of them than `bytes_max` hold.

        What rests on the commits before it is only taken if `is_alone`: no other object is in
        flight, so it lands together with them or after them, never without them. A load has an
        object of its own.

        REQUIRES: the queue is not empty, its front may be taken.
        """
        commits = self._commits
        taken = [commits.popleft()]
        taken_bytes = taken[0].size_bytes
        while commits and taken_bytes + commits[0].size_bytes <= bytes_max:
            if (not is_alone and commits[0].rests_on_state) or taken[0].load or commits[0].load:
                break
            taken.append(commits.popleft())
            taken_bytes += taken[-1].size_bytes
        self.size_bytes -= taken_bytes
        return taken

    def put_back(self, taken: Sequence[Commit], next_seq: int) -> int:
        """Put commits back to their place, and give all numbers from `next_seq` on.

        Returns the next free number. With several objects in flight, commits may come back after
        younger ones: order goes by place, so that it stays as it was submitted. Only what has a
        slot already, or is durable, now comes before what was submitted earlier.
        """
        self._commits = deque(sorted([*taken, *self._commits], key=_PLACE))
        self.size_bytes += sum(commit.size_bytes for commit in taken)
        for commit in self._commits:
            commit.resequence(next_seq)
            next_seq += 1
        return next_seq

    def take_all(self) -> list[Commit]:
        """Empty the queue."""
        taken = list(self._commits)
        self._commits.clear()
        self.size_bytes = 0
        return taken
