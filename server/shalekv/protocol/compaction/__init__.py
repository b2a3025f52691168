"""Compaction as pure rules: the choice of jobs, their inputs and outputs, their publication."""
