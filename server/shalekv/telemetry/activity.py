"""Activities: times and requests of one call, commit or job, for slow calls, traces and costs.

The store records each request in the activity of the task that has sent it (`CURRENT`). Tasks
inherit it from those that create them, so a call that is answered without a task needs none:

    call ---- answered at once ----> nothing is recorded
      |
      +------ a task reads the levels: CURRENT is a `CallActivity` ------> its store requests
      |
      +------ waits for a commit ----> `CommitActivity` of the group: its stages and requests

Times are of `time.perf_counter_ns`, or of the clock that the process has in its place.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shalekv_wire.trace_context import SpanContext

STAGES = ("queued", "encoded", "stored", "visible")  # of a group of commits
# What calls wait for beside their commits and single requests (`CallActivity.waited_ns`).
ADMISSION, READ_SET, TURN = "admission", "read set", "turn"
REQUESTS_MAX = 64  # of one activity that are recorded one by one; all are counted


class SentCounts(dict[str, int]):
    """Requests that were sent over the wire, by `store.api.RequestKind`: what is paid for.

    Each is a thing of its own in sets of weak references, whatever it contains.
    """

    __slots__ = ("__weakref__",)
    __hash__ = object.__hash__  # type: ignore[assignment]

    def add(self, sent: Mapping[str, int]) -> None:
        """Add other requests."""
        for kind, count in sent.items():
            self[kind] = self.get(kind, 0) + count


class StoreRequest:
    """One call of a store: an operation on an object, with all its attempts."""

    __slots__ = (
        "attempt_began_ns",
        "attempts",
        "began_ns",
        "ended_ns",
        "name",
        "operation",
        "problem",
        "size_bytes",
        "waiting_calls",
    )

    def __init__(self, operation: str, name: str, began_ns: int) -> None:
        """`operation` is one of `store.counting.Operation`; `name` an object or a folder."""
        self.operation = operation
        self.name = name
        self.began_ns = began_ns
        self.attempt_began_ns = began_ns  # of the last attempt
        self.ended_ns = 0  # of the last attempt; 0: it has not ended
        self.attempts = 1
        self.size_bytes = 0  # sent by a create, or received
        self.problem = ""  # of the last attempt that failed
        self.waiting_calls = 0  # calls that it has kept waiting, as far as is known


class Activity:
    """Requests to the store for one purpose, and when it began."""

    __slots__ = ("began_ns", "left_out", "requests", "sent", "span")

    def __init__(self, began_ns: int) -> None:
        """Begin without requests."""
        self.began_ns = began_ns
        self.requests: list[StoreRequest] = []  # in the order of their beginnings
        self.left_out = 0  # requests beyond `REQUESTS_MAX`
        self.sent = SentCounts()
        self.span: Any = None  # of the tracer; None: the activity is not traced

    @property
    def call_count(self) -> int:
        """The calls that wait for what is done here."""
        return 0

    def begin_request(self, operation: str, name: str, now_ns: int) -> StoreRequest:
        """Record a request that begins now; the caller sets what becomes of it."""
        request = StoreRequest(operation, name, now_ns)
        self.wait_for(request)
        return request

    def wait_for(self, request: StoreRequest) -> None:
        """Record a request, which may be one that another activity has sent."""
        request.waiting_calls += self.call_count
        if len(self.requests) < REQUESTS_MAX:
            self.requests.append(request)
        else:
            self.left_out += 1


class SharedActivity(Activity):
    """Activity of one task that several others wait for, such as the load of a block.

    All of them record its requests; the one that began it is charged with them.
    """

    __slots__ = ("_waiting",)

    def __init__(self, owner: Activity | None) -> None:
        """`owner` is the activity of the task; None: it has none."""
        super().__init__(0 if owner is None else owner.began_ns)
        self._waiting: dict[Activity, None] = {}
        if owner is not None:
            self.sent = owner.sent
            self._waiting[owner] = None

    def join(self, activity: Activity | None) -> None:
        """Let one more activity wait, if it does not already."""
        if activity is None or activity in self._waiting:
            return
        self._waiting[activity] = None
        for request in self.requests:
            activity.wait_for(request)

    def wait_for(self, request: StoreRequest) -> None:
        """Record a request in all activities that wait."""
        super().wait_for(request)
        for activity in self._waiting:
            activity.wait_for(request)


class CallActivity(Activity):
    """One call, or one operation of a session, that has waited for something."""

    __slots__ = (
        "blocks_cached",
        "blocks_fetched",
        "commit",
        "parent",
        "queued_behind",
        "ssts_searched",
        "trace_id",
        "waited_ns",
    )

    def __init__(self, began_ns: int, parent: SpanContext | None = None) -> None:
        """`parent` is the span of the caller; None: it has told none."""
        super().__init__(began_ns)
        self.parent = parent
        self.trace_id = "" if parent is None else parent.trace_id  # 32 hexadecimal digits
        self.commit: CommitActivity | None = None  # the commit that made it durable
        # Requests of the log that its commit waits for in the queue; None: it is in no queue.
        self.queued_behind: Sequence[StoreRequest] | None = None
        self.waited_ns: dict[str, int] = {}  # for admission, a read set, a turn, and so on
        self.ssts_searched = 0
        self.blocks_cached = 0  # blocks that were at hand: in memory, or in a file that is open
        self.blocks_fetched = 0  # blocks that were waited for: of the store, or the cache on disk

    @property
    def call_count(self) -> int:
        """Return 1: the call itself."""
        return 1


class CommitActivity(Activity):
    """One group of commits on its way to the log and into memory.

    It is made for every group, since what a slow call has waited for is asked afterwards.
    """

    __slots__ = (
        "commit_count",
        "encoded_ns",
        "queued_ns",
        "size_bytes",
        "stored_ns",
        "visible_ns",
        "wal_id",
    )

    def __init__(self, began_ns: int, *, wal_id: int, commit_count: int, size_bytes: int) -> None:
        """`began_ns` is when the group was taken from the queue."""
        super().__init__(began_ns)
        self.wal_id = wal_id
        self.commit_count = commit_count
        self.size_bytes = size_bytes
        self.queued_ns = began_ns  # when the oldest of its commits entered the queue
        self.encoded_ns = 0  # when the bytes of the object were made; 0: not yet
        self.stored_ns = 0  # when it was durable
        self.visible_ns = 0  # when reads showed it

    @property
    def call_count(self) -> int:
        """The commits of the group, each of a call."""
        return self.commit_count

    def take_over(self, displaced: CommitActivity) -> None:
        """Go on with a group whose place in the log was another's: with its requests and costs.

        REQUIRES: this one has sent nothing so far.
        """
        for request in displaced.requests:
            if len(self.requests) < REQUESTS_MAX:
                self.requests.append(request)
            else:
                self.left_out += 1
        self.left_out += displaced.left_out
        if not self.sent:
            self.sent = displaced.sent  # itself: it is known where requests are counted
        else:
            self.sent.add(displaced.sent)
            displaced.sent.clear()

    @property
    def stages_ns(self) -> dict[str, int]:
        """The time of each stage that has ended, in their order."""
        ends = (self.began_ns, self.encoded_ns, self.stored_ns, self.visible_ns)
        begins = (self.queued_ns, *ends)
        return {
            stage: end - begin
            for stage, begin, end in zip(STAGES, begins, ends, strict=False)
            if begin and end
        }


# The activity of the task that runs; None: nobody wants to know.
CURRENT: ContextVar[Activity | None] = ContextVar("CURRENT", default=None)


def current_call() -> CallActivity | None:
    """Return the activity of the call for which the task runs; None: there is none."""
    activity = CURRENT.get()
    return activity if isinstance(activity, CallActivity) else None


class Wait:
    """Context manager that adds the time inside it to what the call of the task has waited for."""

    __slots__ = ("_began_ns", "_what")

    def __init__(self, what: str) -> None:
        """`what` is such as `ADMISSION`."""
        self._what = what
        self._began_ns = 0

    def __enter__(self) -> None:
        """Begin to wait."""
        self._began_ns = perf_counter_ns()

    def __exit__(self, *_: object) -> None:
        """Note that it is over."""
        call = current_call()
        if call is not None:
            waited_ns = perf_counter_ns() - self._began_ns
            call.waited_ns[self._what] = call.waited_ns.get(self._what, 0) + waited_ns
