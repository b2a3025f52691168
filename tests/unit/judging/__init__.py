"""Tests of the checkers: they find what is planted."""
