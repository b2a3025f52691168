"""Scans: a pinned view, cut into tasks, as rows of a frame."""
