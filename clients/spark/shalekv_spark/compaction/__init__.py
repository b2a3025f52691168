"""Compaction by tasks."""
