"""Backups: consistent copies of a database in another store, and databases made of them again."""
