r"""The language of `shalekv shell`: a line is split into words, and words into arguments.

get greeting               words are separated by blanks
set "a key" 'a value'      quotes preserve blanks
get row\x00\x01            escapes as of --escaped, and \" and \' and a backslash before a blank
set config '{"a": "\n"}'   between single quotes all is literal
# a comment
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from shalekv.cli.console.keys import Encoding

_PIECE = re.compile(
    r"""(?P<blank>\s+)
    | '(?P<literal>[^']*)(?P<literal_end>'?)
    | "(?P<quoted>(?:[^"\\]|\\.)*)(?P<quoted_end>"?)
    | (?P<bare>(?:[^\s'"\\]|\\.|\\\Z)+)""",
    re.VERBOSE | re.DOTALL,
)
_PAIR = re.compile(r"\\(.)", re.DOTALL)  # a backslash, and what it is before
_NEEDS_QUOTES = re.compile(r"""[\s"']|^[-#]|^$""")
COMMENT = "#"


class LanguageError(ValueError):
    """A line is not understood. The message says why."""


@dataclass(frozen=True, slots=True)
class Word:
    """A word of a line."""

    data: bytes
    start: int  # its place in the line
    end: int
    is_bare: bool  # it begins without a quote, so that it may be an option

    @property
    def text(self) -> str:
        """The word as text, for verbs and options."""
        return self.data.decode("utf-8", "surrogateescape")


def split(line: str, *, is_partial: bool = False) -> list[Word]:
    """Split a line into words; of one that is still being typed, the last quote may be open.

    Raises `LanguageError`.
    """
    words: list[Word] = []
    is_joined = False  # the next piece belongs to the last word
    for piece in _PIECE.finditer(line):
        if piece["blank"] is not None:
            is_joined = False
            continue
        if not is_partial and "" in (piece["literal_end"], piece["quoted_end"]):
            raise LanguageError(f"the quote at character {piece.start() + 1} is not closed")
        data, start, is_bare = _data(piece), piece.start(), piece["bare"] is not None
        if is_joined:
            first = words.pop()
            data, start, is_bare = first.data + data, first.start, first.is_bare
        words.append(Word(data, start, piece.end(), is_bare))
        is_joined = True
    return words


def quoted(data: bytes) -> str:
    """Return the word for `data`, as it can be typed."""
    text = Encoding.ESCAPED.encode(data)
    if not _NEEDS_QUOTES.search(text):
        return text
    return '"' + text.replace('"', '\\"') + '"'


def _data(piece: re.Match[str]) -> bytes:
    if piece["literal"] is not None:
        return Encoding.TEXT.decode(piece["literal"])
    text = piece["bare"] if piece["quoted"] is None else piece["quoted"]
    try:
        return Encoding.ESCAPED.decode(_PAIR.sub(_plain, text))
    except ValueError as error:
        raise LanguageError(f"{error}; single quotes keep backslashes") from None


def _plain(pair: re.Match[str]) -> str:
    return pair[1] if pair[1] in "\"' " else pair[0]


@dataclass(frozen=True, slots=True)
class Form:
    """The arguments that a verb takes."""

    words_min: int = 0
    words_max: int | None = 0  # None: any number
    options: frozenset[str] = frozenset()  # with a value
    flags: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Arguments:
    """The arguments of a verb."""

    words: tuple[bytes, ...] = ()
    options: Mapping[str, Word] = field(default_factory=dict)
    flags: frozenset[str] = frozenset()

    def number(self, option: str) -> int:
        """Return the number of an option; 0 without it. Raises `LanguageError` for other text."""
        word = self.options.get(option)
        if word is None:
            return 0
        if not word.text.isascii() or not word.text.isdecimal() or not int(word.text):
            raise LanguageError(f"{option} takes a number of at least 1, not {quoted(word.data)}")
        return int(word.text)

    def data(self, option: str) -> bytes:
        """Return the bytes of an option; empty without it."""
        word = self.options.get(option)
        return b"" if word is None else word.data


def arguments_of(words: Sequence[Word], form: Form) -> Arguments:
    """Match the words behind a verb with its form. Raises `LanguageError`."""
    plain: list[bytes] = []
    options: dict[str, Word] = {}
    flags: set[str] = set()
    rest = iter(words)
    for word in rest:
        if not word.is_bare or not word.data.startswith(b"--"):
            plain.append(word.data)
        elif word.text in form.flags:
            flags.add(word.text)
        elif word.text in form.options:
            value = next(rest, None)
            if value is None:
                raise LanguageError(f"{word.text} needs a value")
            options[word.text] = value
        else:
            known = ", ".join(sorted(form.options | form.flags))
            problem = f"there is no option {word.text} here"
            raise LanguageError(f"{problem}: {known}" if known else problem)
    if len(plain) < form.words_min:
        raise LanguageError("an argument is missing")
    if form.words_max is not None and len(plain) > form.words_max:
        raise LanguageError(f"there is a word too many: {quoted(plain[form.words_max])}")
    return Arguments(tuple(plain), options, frozenset(flags))
