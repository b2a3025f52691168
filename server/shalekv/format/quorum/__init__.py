"""Formats of safekeepers: their files, and their messages."""
