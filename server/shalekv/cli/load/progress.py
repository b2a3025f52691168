"""The bar of a load that runs. A module of its own, since the imports take their time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    ProgressColumn,
    Task,
    TextColumn,
    TimeElapsedColumn,
)
from rich.text import Text

from shalekv.cli.console.units import size
from shalekv.cli.load.bulk import BulkProgress
from shalekv.cli.load.ledger import Account


@contextmanager
def progress_bar(size_bytes: int | None) -> Iterator[Callable[[Account], None]]:
    """A bar on stderr, to be called with news; where the size is not known it only moves."""
    columns = (
        TextColumn("{task.fields[rows]:,} rows"),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TimeElapsedColumn(),
    )
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=console.is_terminal) as bar:
        task = bar.add_task("load", total=size_bytes, rows=0)
        yield lambda account: bar.update(task, completed=account.source_bytes, rows=account.rows)


# --- bulk_bar
# The bar of a bulk load: how much is read and sorted, then how much is written.
#
# A module of its own, since the imports take their time.


class _LoadColumn(ProgressColumn):
    """Reads the progress whenever the line is drawn, which a thread of the library does."""

    def __init__(self, progress: BulkProgress) -> None:
        super().__init__()
        self._progress = progress

    def render(self, task: Task) -> Text:
        """What stands in the line."""
        seen = self._progress
        if seen.is_sorted:
            task.completed, task.total = seen.keys, seen.rows
            return Text(f"writing {seen.keys:,} keys, {size(seen.file_bytes)}")
        task.completed, task.total = seen.source_bytes, seen.source_bytes_max
        return Text(f"sorting {seen.rows:,} rows, {size(seen.bytes)}")


@contextmanager
def bulk_bar(progress: BulkProgress) -> Iterator[None]:
    """A line on stderr for as long as this lasts."""
    console = Console(stderr=True)
    columns = (_LoadColumn(progress), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=console.is_terminal) as bar:
        bar.add_task("load", total=progress.source_bytes_max)
        yield
