"""Processes of the commands that run a server: lifecycle, signals, child processes, logs."""
