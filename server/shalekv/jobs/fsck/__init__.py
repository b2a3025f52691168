"""Checks of every object of a database."""
