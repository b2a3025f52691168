"""Buckets of Google and containers of Azure."""
