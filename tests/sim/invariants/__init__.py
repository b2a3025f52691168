"""The invariants of server/docs/protocol.md: at least one checker for each, with its number.

Checkers judge what clients were answered and what the object store holds, decoded with the shipped
format code. They do not use the memory of a writer, except for its size (I13) and for the snapshot
of its levels (I7, I8). `catalogue` lists all checkers, including those in other modules of
`tests.sim`: `callers`, `level_states`, `levels`, `snapshot_readers`, `stalls`, and in the packages
`safekeepers` and `two_phase`.
"""
