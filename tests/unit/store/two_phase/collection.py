"""What a collector does to a store in two phases, in a few lines."""

from __future__ import annotations

from collections.abc import Callable

from shalekv.format.names import parse_temporary_name
from shalekv.store.api import Recovered
from shalekv.store.two_phase.store import TwoPhaseStore


def none_is_collected(_name: str) -> bool:
    """Everything is still needed; but whoever asks knows about collection."""
    return False


async def collect(
    store: TwoPhaseStore, folder: str, is_collected: Callable[[str], bool] = none_is_collected
) -> Recovered:
    """Recover, list, delete what is temporary or collected, and recover again."""
    await store.recover(is_collected)
    listed = [info.name async for info in store.list(folder)]
    doomed = [n for n in listed if is_collected(n) or parse_temporary_name(n) is not None]
    if doomed:
        await store.delete(doomed)
    return await store.recover(is_collected)
