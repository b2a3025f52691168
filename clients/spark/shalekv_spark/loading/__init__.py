"""Bulk loads: sorted rows become files under a lease, and one commit."""
