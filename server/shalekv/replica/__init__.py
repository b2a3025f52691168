"""Replicas: joining a database, following its log, and the engine of a reader."""
