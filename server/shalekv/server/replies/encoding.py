"""Encoding of messages from pieces, as protobuf does it from objects.

Replies to reads have the same few fields thousands of times. Most of their bytes are stored keys
and values; what is between them depends on a length, or on a part of a number, and is encoded once.
"""

from __future__ import annotations

from collections.abc import Callable

SHORT_MAX = 0x7F  # the greatest number of one byte
_PAIR_MAX = 0x3FFF  # ... and of two
_SHORT = [bytes((number,)) for number in range(SHORT_MAX + 1)]
# Bytes of a number that goes on: by their seven bits.
CONTINUED = [bytes((0x80 | bits,)) for bits in range(SHORT_MAX + 1)]
_PIECES_MAX = 4_096  # of one kind that are kept: half a megabyte, at most


def varint(number: int) -> bytes:
    """Return a number, 0 or more, as protobuf writes it: seven bits a byte, the lowest first."""
    if number <= SHORT_MAX:
        return _SHORT[number]
    if number <= _PAIR_MAX:
        return CONTINUED[number & SHORT_MAX] + _SHORT[number >> 7]
    encoded = b""
    while number > SHORT_MAX:
        encoded += CONTINUED[number & SHORT_MAX]
        number >>= 7
    return encoded + _SHORT[number]


class EncodedPieces(dict[int, bytes]):
    """Pieces that depend on one number, each made when it is first asked for."""

    def __init__(self, make: Callable[[int], bytes]) -> None:
        """Make the piece of a number with `make`."""
        super().__init__()
        self._make = make

    def __missing__(self, number: int) -> bytes:
        """Make a piece; begin anew when there are too many."""
        if len(self) >= _PIECES_MAX:
            self.clear()
        piece = self[number] = self._make(number)
        return piece


# The last fields of an Entry and of a BatchGetResult: 3 and 4, both numbers.
_SEQ_TAG, EXPIRY_TAG = b"\x18", b"\x20"
# Encoded sequence numbers with their tag: those up to `SHORT_MAX`, and others in two pieces, which
# are the lowest seven bits, and the rest, of which a database has few different ones.
SHORT_SEQS = [_SEQ_TAG + short for short in _SHORT]
LOW_SEQS = [_SEQ_TAG + low for low in CONTINUED]
HIGH_SEQS = EncodedPieces(varint)
