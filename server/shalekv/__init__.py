"""ShaleKV: a key-value server whose only disk is an object store."""

__version__ = "0.8.0"
