"""Page tokens of a client of several servers: with the address of the one that has the view.

    10 bytes  NUL, "shalekv@", NUL
    1 byte    the length of the address
    ...       the address, then the token of that server

What a single server, or a snapshot, is asked for has the server's own token and nothing before it.
"""

from __future__ import annotations

_MARK = b"\0shalekv@\0"
ADDRESS_BYTES_MAX = 255


def with_address(address: str, token: bytes) -> bytes:
    """The token of the server at `address`, in a form that tells the address."""
    told = address.encode()
    if len(told) > ADDRESS_BYTES_MAX:
        return token  # only its own server knows it: others refuse it
    return _MARK + bytes([len(told)]) + told + token


def without_address(token: bytes) -> tuple[str, bytes]:
    """The address that a token tells, or nothing, and the server's own token."""
    if not token.startswith(_MARK) or len(token) == len(_MARK):
        return "", token
    begin = len(_MARK) + 1
    end = begin + token[begin - 1]
    return token[begin:end].decode(errors="replace"), token[end:]
