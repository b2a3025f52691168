"""Cloning: a new database that shares SSTs of another one, copied on write."""
