"""A scan for programs without an event loop: an ordinary iterator."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Self

from shalekv_client.closing import Closing
from shalekv_client.loop_thread import LoopThread
from shalekv_client.results import Entry, View
from shalekv_client.scan import Scan


class SyncScan(Closing, Iterator[Entry]):
    """As `shalekv_client.Scan`: iterate over it once; left early, close it or use `with`."""

    def __init__(self, scan: Scan, thread: LoopThread) -> None:
        """As `SyncClient.scan` makes it."""
        self._scan = scan
        self._thread = thread
        self._entries: Iterator[Entry] = iter(())

    @property
    def view(self) -> View | None:
        """What is read from; known with the first entry."""
        return self._scan.view

    @property
    def more(self) -> bool:
        """At the end: a limit ended the scan before its range did."""
        return self._scan.more

    @property
    def page_token(self) -> bytes:
        """At the end, if there is more: how to go on, at this view."""
        return self._scan.page_token

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Entry:
        """The next entry. Raises as `SyncClient.get`."""
        for entry in self._entries:
            return entry
        self._entries = iter(self.read())  # a message at a time: a turn in the thread is costly
        return next(self._entries)

    def read(self) -> list[Entry]:
        """The next entries, those that came together; none at the end."""
        entries = list(self._entries)
        return entries or self._thread.run(self._scan.read())

    def next_page(self) -> SyncScan:
        """As `Scan.next_page`."""
        return SyncScan(self._scan.next_page(), self._thread)

    def pages(self) -> Iterator[list[Entry]]:
        """As `Scan.pages`."""
        page = self
        while True:
            with page:
                yield list(page)
            if not page.more:
                return
            page = page.next_page()

    def close(self) -> None:
        """End the call; the entries that were not taken yet are dropped."""
        self._entries = iter(())
        self._thread.run(self._scan.aclose())
