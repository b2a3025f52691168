"""Progress bars of loads. Imported only where a bar is shown, because rich is slow to import."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    ProgressColumn,
    Task,
    TextColumn,
    TimeElapsedColumn,
)
from rich.text import Text

from shalekv.cli.console.units import size
from shalekv.cli.load.ledger import Account, BulkProgress


class _ReadColumn(ProgressColumn):
    def render(self, task: Task) -> Text:
        """Bytes read, of how many if that is known."""
        total = "" if task.total is None else f" of {size(task.total)}"
        return Text(f"{size(task.completed)}{total}")


@contextmanager
def progress_bar(size_bytes: int | None) -> Iterator[Callable[[Account], None]]:
    """Show a bar on stderr; call the result to update it. An unknown size shows no percentage."""
    columns = (
        TextColumn("{task.fields[rows]:,} rows"),
        BarColumn(),
        _ReadColumn(),
        TimeElapsedColumn(),
    )
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=console.is_terminal) as bar:
        task = bar.add_task("load", total=size_bytes, rows=0)
        yield lambda account: bar.update(task, completed=account.source_bytes, rows=account.rows)


class _BulkColumn(ProgressColumn):
    """Reads the progress of a bulk load whenever the line is drawn, in a thread of rich."""

    def __init__(self, progress: BulkProgress) -> None:
        super().__init__()
        self._progress = progress

    def render(self, task: Task) -> Text:
        """Rows sorted, then keys written; also updates the bar of `task`."""
        progress = self._progress
        if progress.is_sorted:
            task.completed, task.total = progress.keys, progress.rows
            return Text(f"writing {progress.keys:,} keys, {size(progress.file_bytes)}")
        task.completed, task.total = progress.source_bytes, progress.source_bytes_max
        return Text(f"sorting {progress.rows:,} rows, {size(progress.bytes)}")


@contextmanager
def bulk_bar(progress: BulkProgress) -> Iterator[None]:
    """Show the progress of a bulk load on stderr."""
    console = Console(stderr=True)
    columns = (_BulkColumn(progress), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=console.is_terminal) as bar:
        bar.add_task("load", total=progress.source_bytes_max)
        yield
