"""Pure state and decisions: no I/O, no clock, no randomness, nothing to await."""
