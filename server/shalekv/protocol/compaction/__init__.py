"""Which compactions run, what they read and write, and how they are published; pure."""
