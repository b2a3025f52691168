"""Replies to reads, as serialized messages."""
