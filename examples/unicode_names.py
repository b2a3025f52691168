#!/usr/bin/env python3
"""Real input to play with: the name of every Unicode character that Python knows, as TSV.

    python3 examples/unicode_names.py | shalekv load

A line is the name, a TAB, the character and its code point:

    CAT FACE    🐱 U+1F431

so that a prefix finds a script (GREEK), a kind (GREEK SMALL LETTER) or a family (CAT FACE).
Characters without a shape of their own (spaces, marks, directions) stand as their code point
alone. Names are ASCII letters, digits, spaces, hyphens and parentheses. How many there are depends
on the version of Unicode that Python carries; the script says so on stderr.
"""

from __future__ import annotations

import signal
import sys
import unicodedata
from collections.abc import Iterator

# Categories whose characters stand for themselves: letters, numbers, punctuation, symbols.
SHAPES = frozenset("LNPS")


def pairs() -> Iterator[tuple[str, str]]:
    """Name and value of each character that has a name, in the order of the code points."""
    for point in range(sys.maxunicode + 1):
        character = chr(point)
        name = unicodedata.name(character, "")
        if name:
            has_shape = unicodedata.category(character)[0] in SHAPES
            yield name, f"{character} U+{point:04X}" if has_shape else f"U+{point:04X}"


def main() -> None:
    """Write the pairs to stdout, and their number to stderr."""
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` ends it without a traceback
    lines = [f"{name}\t{value}\n".encode() for name, value in pairs()]
    sys.stdout.buffer.writelines(lines)
    sys.stderr.write(f"{len(lines):,} names of Unicode {unicodedata.unidata_version}\n")


if __name__ == "__main__":
    main()
