"""Compaction as pure decisions: what to merge next, and what a merge does to the manifest."""
