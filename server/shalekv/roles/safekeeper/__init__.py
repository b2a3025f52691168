"""The safekeeper role: a node that holds the logs of databases until they are in the archive."""
