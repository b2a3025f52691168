"""Runs of the files in ops/ by a real Prometheus over real processes."""
