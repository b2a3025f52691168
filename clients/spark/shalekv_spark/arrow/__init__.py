"""Rows of SSTs as Arrow arrays: blocks, merges, and what range tombstones hide."""
