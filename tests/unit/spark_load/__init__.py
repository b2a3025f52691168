"""Loads of the pipeline, without Spark: rows, blocks, tasks, reports and commits."""
