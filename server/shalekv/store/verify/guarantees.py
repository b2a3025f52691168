"""What a database guarantees, and what happens without it: told of a store that is unfit.

Each begins with the guarantee and its number in docs/protocol.md.
"""

from __future__ import annotations

ONE_WINNER = (
    "one winner per slot of the log and per manifest (I3, I5): two writers would both believe that "
    "they won, and acknowledged writes would be lost"
)
DURABLE = "durability (I1): a recovery would miss acknowledged writes"
NO_GAP = "a log without gaps (I4): a writer that opens would miss acknowledged writes"
NOT_BACK = "deletion that lasts (I2): what was collected would be taken for present"
IN_ORDER = "one current manifest (I5): processes would go on with an older state of the database"
WHOLE = "bytes as they were written (I12): reads would fail as if the database were damaged"
TIMELY = "protection by snapshots and leases (I7, I8): what they name would be deleted too early"
