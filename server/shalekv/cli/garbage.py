"""Keeps Python's garbage collector from stalling the event loop.

A writer keeps millions of objects for long, and frees them by counting references. A full
collection looks at every one of them and finds nothing: with two million entries in a memtable
one took 315 ms, in which no call is served. So what is there when serving begins (imports, the
replayed memtable) is taken out of the collector's sight, and full collections of the rest don't
happen. Young objects are still collected, in bites: of those two million entries none was longer
than 4 ms. The price: a cycle of objects that survives two young collections is never freed.
"""

from __future__ import annotations

import gc

# The first of three generations is collected after this many new objects.
YOUNG_OBJECTS = 5_000
# ... the second, with what ten of those have left, at most 50,000 objects
YOUNG_COLLECTIONS = 10
# ... and all of them never: so many collections of the second don't come together.
MIDDLE_COLLECTIONS = 1_000_000_000


def tame_garbage_collector() -> None:
    """Call when what lives long is there: after the replay, before the first call.

    What an earlier call took out of sight is looked at once more: it may have died since.
    """
    gc.unfreeze()
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS, YOUNG_COLLECTIONS, MIDDLE_COLLECTIONS)
