"""Compaction: merging the WAL into level 0, and levels into levels."""
