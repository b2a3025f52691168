"""Watches: from WAL objects, as they land or as they stand in the store, to commits in a range."""
