"""Objects that refer to each other in a cycle, which only the garbage collector frees."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Awaitable, Callable


def cycles() -> list[object]:
    """Collect now: everything that nothing but that would have freed, kept alive."""
    flags = gc.get_debug()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        gc.collect()
        return list(gc.garbage)
    finally:
        gc.set_debug(flags)
        gc.garbage.clear()


async def cycles_of(act: Callable[[], Awaitable[object]]) -> Counter[str]:
    """The types of what is left to the collector when `act` has come to its end."""
    gc.collect()
    gc.freeze()  # older objects are not examined
    gc.disable()
    try:
        await act()
        return Counter(type(each).__qualname__ for each in cycles())
    finally:
        gc.enable()
        gc.unfreeze()
