"""The deterministic simulation: the shipped code on a virtual clock, with faults from a seed."""
