"""Tests of bulk loads."""
