"""Electors: they decide who *tries* to be the writer. Safety never rests on one."""
