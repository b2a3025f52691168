"""Bulk loads: sorted rows are written to files under a lease, and committed as one."""
