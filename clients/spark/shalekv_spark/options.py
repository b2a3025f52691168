"""Parses the options of the data sources; errors name the option.

Spark passes options as strings, and ignores the case of their names.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Callable, Mapping
from typing import TypeVar

from shalekv.errors import InvalidSetting
from shalekv_spark.place import STORE_PREFIX, Place

T = TypeVar("T")

KEY_ENCODINGS: Mapping[str, Callable[[str], bytes]] = {
    "utf-8": str.encode,
    "hex": bytes.fromhex,
    "base64": lambda text: base64.b64decode(text, validate=True),
}


class Options:
    """The given options. Each is taken once; after that, call `check_all_taken`."""

    def __init__(self, given: Mapping[str, str]) -> None:
        """Start with the options that Spark passes."""
        self._given = {name.lower(): value for name, value in given.items()}
        self._known: list[str] = []

    def place(self) -> Place:
        """Take `url` (or `path`, the argument of ``load(...)``) and the settings of the store."""
        if "paths" in self._given:  # the argument of ``load([...])``
            raise InvalidSetting("option path: expected one database, found several")
        url = self.text("url") or self.text("path")
        if not url:
            raise InvalidSetting("the option url is missing: where the database is")
        store = {
            name.removeprefix(STORE_PREFIX): self._given.pop(name)
            for name in [*self._given]
            if name.startswith(STORE_PREFIX)
        }
        return Place.of(url, store)

    def text(self, name: str, default: str = "") -> str:
        """Take a text."""
        self._known.append(name)
        return self._given.pop(name.lower(), default)

    def number(
        self, name: str, default: int, *, at_least: int = 1, at_most: int | None = None
    ) -> int:
        """Take a whole number from `at_least` to `at_most`."""
        text = self.text(name, str(default))
        try:
            number = int(text)
        except ValueError:
            number = at_least - 1
        if number < at_least or (at_most is not None and number > at_most):
            bounds = "on" if at_most is None else f"to {at_most}"
            raise InvalidSetting(
                f"option {name}: expected a number from {at_least} {bounds}, found {text!r}"
            )
        return number

    def choice(self, name: str, choices: Mapping[str, T], default: str) -> T:
        """Take the name of one of `choices`; return its value."""
        text = self.text(name, default)
        if text.lower() not in choices:
            raise InvalidSetting(
                f"option {name}: expected one of {', '.join(choices)}, found {text!r}"
            )
        return choices[text.lower()]

    def key_decoding(self) -> Callable[[str], bytes]:
        """Take the option keyEncoding; return the function that decodes keys in options."""
        return self.choice("keyEncoding", KEY_ENCODINGS, "utf-8")

    def key(self, name: str, decode: Callable[[str], bytes]) -> bytes | None:
        """Take a key, decoded by `decode`; None: it is not given."""
        self._known.append(name)
        if name.lower() not in self._given:
            return None
        text = self._given.pop(name.lower())
        try:
            return decode(text)
        except (ValueError, binascii.Error) as error:
            raise InvalidSetting(f"option {name}: {error}") from None

    def check_all_taken(self) -> None:
        """Raise `InvalidSetting` if an unknown option was given."""
        if self._given:
            unknown, known = ", ".join(sorted(self._given)), ", ".join(sorted(self._known))
            raise InvalidSetting(
                f"unknown option {unknown}; known are {known}, and {STORE_PREFIX}<setting>"
            )
