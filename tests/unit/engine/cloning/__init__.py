"""Clones: what they share, what they don't, and who keeps it."""
