"""Input and output of commands: options, settings, tables, progress."""
