"""Which column, or field, of a row is the key and which the value, and how they are spelled."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shalekv.cli.console.keys import Encoding

KEY = "key"
VALUE = "value"


@dataclass(frozen=True, slots=True)
class Columns:
    """What the user says of the columns."""

    key: str | None = None  # a name, or a number from 1; None: not said
    value: str | None = None
    header: bool | None = None  # whether the first row names the columns
    encoding: Encoding = Encoding.TEXT  # of columns whose names don't say another

    @property
    def are_named(self) -> bool:
        """Whether one of them is given by its name."""
        given = [word for word in (self.key, self.value) if word is not None]
        return any(number_of(word) is None for word in given)

    @property
    def are_given(self) -> bool:
        """Whether one of them is given at all."""
        return self.key is not None or self.value is not None


def number_of(word: str) -> int | None:
    """The number of a column, from 1, if `word` is one."""
    return int(word) if word.isascii() and word.isdecimal() and int(word) else None


def spellings(name: str, encoding: Encoding) -> list[tuple[str, Encoding]]:
    """The names under which a column may stand, each with the encoding of its cells.

    ``NAME`` is in `encoding`; ``NAME_hex``, ``NAME_base64`` and ``NAME_escaped`` say theirs, as
    `json_field` writes them.
    """
    said = [e for e in Encoding if e is not Encoding.TEXT]
    return [(name, encoding), *((f"{name}_{e.value}", e) for e in said)]


def find_column(word: str, names: Sequence[str], encoding: Encoding) -> tuple[int, Encoding]:
    """The index of a column in a header with `names`, and how its cells are spelled.

    Raises ValueError, which says what is there instead.
    """
    number = number_of(word)
    if number is not None:
        return number - 1, encoding
    for name, spelled in spellings(word, encoding):
        if name in names:
            return names.index(name), spelled
    raise ValueError(f"there is no column '{word}'; the header has: {', '.join(names)}")
