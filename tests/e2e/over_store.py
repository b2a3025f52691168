"""Runs the command `shalekv` as it is shipped, over stores that somebody stands before."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Protocol

from shalekv.runtime import Runtime
from shalekv.settings import StoreSettings
from shalekv.store import opening as stores
from shalekv.store.api import ObjectStore


class OpenStore(Protocol):
    """As `shalekv.store.opening.open_store`."""

    def __call__(self, url: str, runtime: Runtime, settings: StoreSettings) -> ObjectStore:
        """Open the store at `url`."""
        ...


def run_over(wrap: Callable[[OpenStore], OpenStore], argv: Sequence[str]) -> None:
    """Run the command with these arguments; it opens its stores by what `wrap` makes of opening."""
    stores.open_store = wrap(stores.open_store)  # before any command takes it from there
    from shalekv.cli.main import main as shalekv  # noqa: PLC0415

    sys.argv = ["shalekv", *argv]
    shalekv()
