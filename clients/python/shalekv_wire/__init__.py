"""gRPC over HTTP/2 for asyncio: what client and server share below their own messages.

Calls are by path, messages are bytes. The package imports neither protobuf nor grpcio, and knows
nothing of ShaleKV.
"""
