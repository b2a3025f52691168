"""Telemetry of the processes of a database: metrics, activities, traces, costs."""
