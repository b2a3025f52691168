"""Bulk loads: files that tools write into the store themselves, and commit as one load."""
