"""Backups: creating, restoring, verifying and deleting them."""
