"""Pure state machines and rules on which safety rests; no I/O, no clock, no randomness."""
