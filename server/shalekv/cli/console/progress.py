"""The bar of a command that writes rows into a file. A module of its own: its imports are slow."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from rich.console import Console
from rich.progress import Progress, ProgressColumn, SpinnerColumn, Task, TimeElapsedColumn
from rich.text import Text

from shalekv.cli.measures import size


class _Rows(Protocol):
    """Counts of rows and of their bytes, which grow while the bar is shown."""

    rows: int
    bytes: int


class _Told(ProgressColumn):
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
        SpinnerColumn(), _Told(told), TimeElapsedColumn(), console=console, transient=True
    ) as bar:
        bar.add_task("rows", total=None)
        yield
