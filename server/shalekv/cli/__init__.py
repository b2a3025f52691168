"""Command line: arguments, configuration, and the composition of each process."""
