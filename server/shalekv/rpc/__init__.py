"""The gRPC transport: adapts calls to the services of the roles."""
