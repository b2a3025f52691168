"""Generated from protos/shalekv/v1 by `make protos`."""
