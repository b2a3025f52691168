"""Interface of what records spans.

A call is recorded if its caller's span is, or, without one, by chance (`--trace-ratio`). Without a
tracer nothing is recorded, and costs nothing; the trace id of the caller is passed on all the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Protocol

from shalekv.telemetry.activity import CURRENT, Activity, CallActivity, CommitActivity


class Tracer(Protocol):
    """Records spans: `telemetry.otel`, if the process exports any."""

    @property
    def dropped(self) -> int:
        """The number of spans that could not be exported."""
        ...

    @property
    def by_chance(self) -> Callable[[], bool]:
        """Function that returns whether to record a call whose caller has told no span.

        It is asked once for each, before anything is made for it.
        """
        ...

    def begin_call(self, method: str, activity: CallActivity) -> None:
        """Set `activity.span` and its trace id.

        REQUIRES: the call is sampled.
        """
        ...

    def end_call(self, activity: CallActivity, code: str, ended_ns: int) -> None:
        """Record the span of a call: admission, store requests, and a link to its commit.

        `code` is the name of its status. Requests that are added to the activity afterwards are not
        recorded. Begins the span of the group of its commit, if it is the first one of the group
        that is recorded. REQUIRES: it has a span.
        """
        ...

    def end_commit(self, activity: CommitActivity, problem: str = "") -> None:
        """Record the span of a group with its stages and requests, if one of its calls has one.

        REQUIRES: all of its calls that are told at once were answered, so that it links to them.
        Called once for each group.
        """
        ...

    def begin_job(self, name: str) -> Activity:
        """Begin a job beside the calls, such as a merge: each is recorded."""
        ...

    def end_job(
        self, activity: Activity, attributes: Mapping[str, str | int], problem: str = ""
    ) -> None:
        """Record the span of a job with its store requests. REQUIRES: it has a span."""
        ...


@contextmanager
def recorded_job(tracer: Tracer | None, name: str) -> Iterator[dict[str, str | int]]:
    """Record what is done while entered as a job; yields its attributes, to add to them."""
    attributes: dict[str, str | int] = {}
    if tracer is None:
        yield attributes
        return
    activity, problem = tracer.begin_job(name), ""
    before = CURRENT.set(activity)
    try:
        yield attributes
    except BaseException as error:
        problem = type(error).__name__
        raise
    finally:
        CURRENT.reset(before)
        tracer.end_job(activity, attributes, problem)
