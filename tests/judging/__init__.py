"""Checkers of the invariants of databases, for whoever runs one: in earnest or simulated."""
