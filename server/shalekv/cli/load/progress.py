"""The bar of a load that runs. A module of its own, since the imports take their time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
)

from shalekv.cli.loading.account import Account


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
