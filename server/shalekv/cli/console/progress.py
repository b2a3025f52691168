"""The bar of a command that writes rows into a file. A module of its own: its imports are slow."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    ProgressColumn,
    SpinnerColumn,
    Task,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.text import Text

from shalekv.cli.console.units import size

if TYPE_CHECKING:
    from shalekv.jobs.backup.copy import Copying
    from shalekv.jobs.fsck.objects import CheckProgress


class _Rows(Protocol):
    """Counts of rows and of their bytes, which grow while the bar is shown."""

    rows: int
    bytes: int


class _RowsColumn(ProgressColumn):
    """Reads the count whenever the line is drawn, which a thread of the library does."""

    def __init__(self, told: _Rows) -> None:
        super().__init__()
        self._told = told

    def render(self, task: Task) -> Text:
        """What stands in the line."""
        told, elapsed_s = self._told, max(task.elapsed or 0.0, 0.001)
        per_second = f"{told.rows / elapsed_s:,.0f} rows/s, {size(told.bytes / elapsed_s)}/s"
        return Text(f"{told.rows:,} rows, {size(told.bytes)}, {per_second}")


@contextmanager
def rows_bar(told: _Rows) -> Iterator[None]:
    """A line on stderr for as long as this lasts."""
    console = Console(stderr=True)
    with Progress(
        SpinnerColumn(), _RowsColumn(told), TimeElapsedColumn(), console=console, transient=True
    ) as bar:
        bar.add_task("rows", total=None)
        yield


# --- copying_bar
# The bar that tells how far a copy has come. A module of its own: its imports are slow.


_MIB = 1 << 20


class _SeenBytes(ProgressColumn):
    """Reads the progress whenever the line is drawn, which a thread of the library does."""

    def __init__(self, copying: Copying) -> None:
        super().__init__()
        self._copying = copying

    def render(self, task: Task) -> Text:
        """What stands in the line."""
        seen = self._copying
        done_bytes = seen.bytes_copied + seen.bytes_present
        task.completed, task.total = done_bytes, seen.bytes_total or None
        objects = f"{seen.objects_copied + seen.objects_present:,} of {seen.objects_total:,}"
        return Text(
            f"{objects} objects, {done_bytes // _MIB:,} of {seen.bytes_total // _MIB:,} MiB"
        )


@contextmanager
def copying_bar(what: str, copying: Copying) -> Iterator[None]:
    """A line on stderr for as long as this lasts."""
    columns = (_SeenBytes(copying), BarColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        bar.add_task(what, total=None)
        yield


# --- checking_bar
# The line that tells how far a check has come. A module of its own: its imports are slow.


class _Seen(ProgressColumn):
    """Reads the progress whenever the line is drawn, which a thread of the library does."""

    def __init__(self, progress: CheckProgress) -> None:
        super().__init__()
        self._progress = progress

    def render(self, task: Task) -> Text:
        """What stands in the line."""
        del task  # it is all in the progress
        seen = self._progress
        objects = f"{seen.wal_objects + seen.ssts:,} of {seen.objects_total:,} objects"
        merged = f", {seen.merged_keys:,} keys merged" if seen.merged_keys else ""
        return Text(f"{objects}, {seen.size_bytes // _MIB:,} MiB{merged}")


@contextmanager
def checking_bar(progress: CheckProgress) -> Iterator[None]:
    """A line on stderr for as long as this lasts."""
    console = Console(stderr=True)
    with Progress(
        SpinnerColumn(), _Seen(progress), TimeElapsedColumn(), console=console, transient=True
    ) as bar:
        bar.add_task("check", total=None)
        yield
