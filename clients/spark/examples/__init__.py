"""Pipelines that run as they are."""
