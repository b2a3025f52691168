"""The safekeeper role: the members of several databases on one node, their archivers and relays."""
