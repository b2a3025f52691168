"""The version of the distribution `shalekv`: that of `shalekv-client` is the same."""

VERSION = "0.8.0"
