"""The invariants of server/docs/protocol.md: one checker or more for each, with its number.

They look at what clients were told and at what stands in the store, decoded with the shipped
format code, and never at the memory of a writer, but for how much it is (I13), and of which
snapshot its levels are (I7, I8). `catalogue` knows all of them, also those that stand beside what
they watch: in `deletions`, `drops`, `held_trees`, `janitors`, `level_states`, `two_phase` and
`safekeepers` of `tests.sim`.
"""
