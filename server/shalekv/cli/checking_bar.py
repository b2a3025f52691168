"""The line that tells how far a check has come. A module of its own: its imports are slow."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import Progress, ProgressColumn, SpinnerColumn, Task, TimeElapsedColumn
from rich.text import Text

from shalekv.engine.fsck.progress import CheckProgress

_MIB = 1 << 20


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
