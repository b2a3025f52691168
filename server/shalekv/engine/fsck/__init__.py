"""Checks of a whole database in its object store: everything reachable, nothing changed."""
