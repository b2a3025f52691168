"""Checkers of the invariants of databases, for real and for simulated runs."""
