"""The command line: arguments, configuration, and the composition of a role."""
