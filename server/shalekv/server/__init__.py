"""The roles of a server, and the calls that they answer, in protobuf messages without gRPC."""
