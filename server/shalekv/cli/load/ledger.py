"""Writes down what is certain of a load, now and then and at its end: bad rows, and the state."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

from shalekv.cli.loading.account import Account
from shalekv.cli.loading.bad_row_file import BadRowFile
from shalekv.cli.loading.state import LoadState, write_state

SAVE_INTERVAL_S = 0.5  # each costs a few syncs of the disk


class Ledger:
    """Keeps the files of a load up to date, bad rows before the state that counts them."""

    def __init__(
        self,
        account: Account,
        *,
        state: LoadState | None = None,
        state_path: Path | None = None,
        bad_rows: BadRowFile | None = None,
    ) -> None:
        """`state` is what the load goes on from; None, and no path: nothing is kept."""
        self.state = state
        self._account = account
        self._state_path = state_path
        self._bad_rows = bad_rows
        self._rows_before = state.rows if state else 0
        self._bad_rows_before = state.bad_rows if state else 0
        self._next_save_s = 0.0
        self._is_saving = False

    @property
    def _keeps_something(self) -> bool:
        return self._state_path is not None or self._bad_rows is not None

    @property
    def bad_rows_count(self) -> int:
        """How many bad rows are in their file."""
        return self._bad_rows_before + (self._bad_rows.count if self._bad_rows else 0)

    async def note(self) -> None:
        """Something was acknowledged. Save if it is time to, without keeping others waiting."""
        now_s = asyncio.get_running_loop().time()
        try:
            self._collect()
            if self._is_saving or now_s < self._next_save_s or not self._keeps_something:
                return
            self._is_saving = True
            await asyncio.to_thread(self._save, self._certain(is_end=False))
        except OSError as error:
            self._account.file_trouble = error
        self._is_saving = False
        self._next_save_s = asyncio.get_running_loop().time() + SAVE_INTERVAL_S

    def finish(self, *, is_whole: bool) -> None:
        """Save for the last time, when nothing is under way any more.

        Not when a file could not be written before: what is in the others then is consistent.
        """
        if self._account.file_trouble or not self._keeps_something:
            return
        try:
            self._collect()
            self._save(self._certain(is_end=is_whole))
        except OSError as error:
            self._account.file_trouble = error

    def _collect(self) -> None:
        """Move bad rows from memory into their file, which needn't be on the disk yet."""
        if self._bad_rows is not None:
            self._bad_rows.add(self._account.take_bad())

    def _certain(self, *, is_end: bool) -> LoadState | None:
        """The state now; in the loop's thread, since the account changes there."""
        if self.state is None:
            return None
        self.state = replace(
            self.state.at(self._account.position),
            rows=self._rows_before + self._account.certain_rows,
            bad_rows=self.bad_rows_count,
            bad_rows_bytes=self._bad_rows.size_bytes
            if self._bad_rows
            else self.state.bad_rows_bytes,
            complete=is_end,
        )
        return self.state

    def _save(self, state: LoadState | None) -> None:
        if self._bad_rows is not None:
            self._bad_rows.sync()
        if state is not None and self._state_path is not None:
            write_state(self._state_path, state)
