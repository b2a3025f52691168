"""The life of a process: start, signals, child processes, logs, shutdown."""
