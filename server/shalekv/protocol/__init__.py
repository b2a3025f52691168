"""Pure state machines and rules that decide safety: no I/O, no clock, no randomness."""
