"""A quick load against a server: what is asked for, how it is measured, what is told."""
