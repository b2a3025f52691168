"""The options of a write that must hold for it to be done."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

from shalekv.cli.console.option_groups import gathered
from shalekv_client import Absent, Condition, Present, SeqEquals

CommandT = TypeVar("CommandT", bound=Callable[..., Any])

SEQ_MAX = 2**64 - 1


def condition_options(command: CommandT) -> CommandT:
    """A decorator that adds --if-absent, --if-present and --if-seq, as the argument `condition`."""
    names = ("if_absent", "if_present", "if_seq")
    command = gathered("condition", names, _condition)(command)
    command = click.option(
        "--if-seq",
        type=click.IntRange(1, SEQ_MAX),
        metavar="SEQ",
        help="Only if its value was written by this commit, as get and scan tell it.",
    )(command)
    command = click.option("--if-present", is_flag=True, help="Only if it has a value.")(command)
    return click.option("--if-absent", is_flag=True, help="Only if it has no value.")(command)


def _condition(*, if_absent: bool, if_present: bool, if_seq: int | None) -> Condition | None:
    given: list[Condition] = []
    if if_absent:
        given.append(Absent())
    if if_present:
        given.append(Present())
    if if_seq is not None:
        given.append(SeqEquals(if_seq))
    if len(given) > 1:
        raise click.UsageError("--if-absent, --if-present and --if-seq exclude each other")
    return given[0] if given else None
