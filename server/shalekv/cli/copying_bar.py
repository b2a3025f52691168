"""The bar that tells how far a copy has come. A module of its own: its imports are slow."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    ProgressColumn,
    Task,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.text import Text

from shalekv.jobs.backup.copy import Copying

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
