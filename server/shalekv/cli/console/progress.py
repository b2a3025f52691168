"""Progress bars on stderr for rows written, a copy, and a check.

Imported only where a bar is shown, because rich is slow to import. The columns read their counts
whenever a line is drawn, in a thread of rich.
"""

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
    from shalekv.jobs.backup.copy import CopyProgress
    from shalekv.jobs.fsck.objects import CheckProgress


_MIB = 1 << 20


class _Rows(Protocol):
    """Counts of rows and of their bytes, which grow while the bar is shown."""

    rows: int
    bytes: int


class _RowsColumn(ProgressColumn):
    def __init__(self, written: _Rows) -> None:
        super().__init__()
        self._written = written

    def render(self, task: Task) -> Text:
        """Rows, bytes and rates."""
        written, elapsed_s = self._written, max(task.elapsed or 0.0, 0.001)
        per_second = f"{written.rows / elapsed_s:,.0f} rows/s, {size(written.bytes / elapsed_s)}/s"
        return Text(f"{written.rows:,} rows, {size(written.bytes)}, {per_second}")


@contextmanager
def rows_bar(written: _Rows) -> Iterator[None]:
    """Show the progress of a command that writes rows."""
    console = Console(stderr=True)
    with Progress(
        SpinnerColumn(), _RowsColumn(written), TimeElapsedColumn(), console=console, transient=True
    ) as bar:
        bar.add_task("rows", total=None)
        yield


class _CopyColumn(ProgressColumn):
    def __init__(self, copying: CopyProgress) -> None:
        super().__init__()
        self._copying = copying

    def render(self, task: Task) -> Text:
        """Objects and bytes copied, of how many; also updates the bar of `task`."""
        copying = self._copying
        done_bytes = copying.bytes_copied + copying.bytes_present
        task.completed, task.total = done_bytes, copying.bytes_total or None
        done = copying.objects_copied + copying.objects_present
        if not copying.objects_total:  # they are still being listed
            return Text(f"{done:,} objects, {done_bytes // _MIB:,} MiB")
        return Text(
            f"{done:,} of {copying.objects_total:,} objects, "
            f"{done_bytes // _MIB:,} of {copying.bytes_total // _MIB:,} MiB"
        )


@contextmanager
def copying_bar(what: str, copying: CopyProgress) -> Iterator[None]:
    """Show the progress of a copy of objects."""
    columns = (_CopyColumn(copying), BarColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        bar.add_task(what, total=None)
        yield


class _CheckColumn(ProgressColumn):
    def __init__(self, progress: CheckProgress) -> None:
        super().__init__()
        self._progress = progress

    def render(self, task: Task) -> Text:
        """Objects and bytes checked, and keys merged."""
        del task  # not needed
        checked = self._progress
        objects = f"{checked.wal_objects + checked.ssts:,} of {checked.objects_total:,} objects"
        merged = f", {checked.merged_keys:,} keys merged" if checked.merged_keys else ""
        return Text(f"{objects}, {checked.size_bytes // _MIB:,} MiB{merged}")


@contextmanager
def checking_bar(progress: CheckProgress) -> Iterator[None]:
    """Show the progress of a check of a database."""
    console = Console(stderr=True)
    columns = (SpinnerColumn(), _CheckColumn(progress), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        bar.add_task("check", total=None)
        yield
