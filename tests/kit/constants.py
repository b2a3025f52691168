"""Replaces constants of the product in tests, such as intervals that a test cannot wait for.

A constant is given by the module that defines it and its name, such as
``"shalekv.rpc.native_server:CONNECTION_IDLE_MS"``. It is replaced in every module that has imported
it.
"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import contextmanager

import pytest

Constants = Mapping[str, float]

_VARIABLE = "TEST_CONSTANTS"


@contextmanager
def constants(values: Constants) -> Iterator[None]:
    """Replace these constants in this process until the end of the block."""
    with pytest.MonkeyPatch.context() as patch:
        set_constants(patch, values)
        yield


def set_constants(patch: pytest.MonkeyPatch, values: Constants) -> None:
    """Replace these constants in this process until `patch` is undone."""
    for place, value in values.items():
        module, _, name = place.partition(":")
        old = getattr(importlib.import_module(module), name)
        for each in list(sys.modules.values()):
            if getattr(each, "__name__", "").startswith("shalekv") and vars(each).get(name) is old:
                patch.setattr(each, name, value)


def variables(values: Constants) -> dict[str, str]:
    """The environment of a process, started by the launcher, with these constants."""
    return {_VARIABLE: json.dumps(dict(values))}


def set_constants_as_given(environment: MutableMapping[str, str]) -> None:
    """Replace the constants that `variables` has put into the environment of this process."""
    set_constants(pytest.MonkeyPatch(), json.loads(environment.pop(_VARIABLE, "{}")))


_drawn = pytest.MonkeyPatch()


def draw(values: Constants) -> None:
    """Replace these constants until the end of the simulation."""
    set_constants(_drawn, values)


def undo_drawn() -> None:
    """Undo what `draw` has replaced."""
    _drawn.undo()
