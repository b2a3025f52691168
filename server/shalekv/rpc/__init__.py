"""Transport adapters: gRPC in, roles out."""
