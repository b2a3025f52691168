"""Encoding of messages from pieces, as protobuf does it from objects.

Replies to reads have the same few fields thousands of times. Most of their bytes are stored keys
and values; what is between them depends on a length, or on a part of a number, and is encoded once.
"""

from __future__ import annotations

from collections.abc import Callable

from shalekv.format.coding import CONTINUED, SHORT_NUMBERS, varint

_PIECES_MAX = 4_096  # of one kind that are kept: half a megabyte, at most


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
SHORT_SEQS = [_SEQ_TAG + short for short in SHORT_NUMBERS]
LOW_SEQS = [_SEQ_TAG + low for low in CONTINUED]
HIGH_SEQS = EncodedPieces(varint)
