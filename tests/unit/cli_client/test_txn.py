"""`shalekv txn`: parsing of its notation."""

from __future__ import annotations

import pytest

from shalekv.cli.commands.txn import NotationError, Script, parse_script
from shalekv.cli.console.keys import Encoding
from shalekv_client import (
    Add,
    Delete,
    DeleteRange,
    Exists,
    Get,
    Missing,
    Operator,
    Put,
    RangeEmpty,
    SeqIs,
    Touch,
    ValueIs,
)

EVERYTHING = """
# a comment
exists a
missing 'b b'
seq a = 12
seq a != 0
value a < "x y"
value a > \\'
empty --prefix p
empty --start a --end b

get a
put a ''
put a b --ttl 10m
add n
# another
add n -3
touch a 10m
touch a never

delete a
delete --prefix p
delete --start s
delete --end e
"""


def test_every_line_of_the_notation() -> None:
    """Each form of a line is parsed into its comparison or operation."""
    found = parse_script(EVERYTHING, Encoding.TEXT)
    assert found.compares == (
        Exists(b"a"),
        Missing(b"b b"),
        SeqIs(b"a", seq=12),
        SeqIs(b"a", seq=0, op=Operator.NOT_EQUAL),
        ValueIs(b"a", b"x y", Operator.LESS),
        ValueIs(b"a", b"'", Operator.GREATER),
        RangeEmpty(prefix=b"p"),
        RangeEmpty(start=b"a", end=b"b"),
    )
    assert found.then == (
        Get(b"a"),
        Put(b"a", b""),
        Put(b"a", b"b", 600_000),
        Add(b"n", 1),
        Add(b"n", -3),
        Touch(b"a", 600_000),
        Touch(b"a", 0),
    )
    assert found.otherwise == (
        Delete(b"a"),
        DeleteRange(prefix=b"p"),
        DeleteRange(start=b"s"),
        DeleteRange(end=b"e"),
    )


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("get a", (0, 1, 0)),
        ("\n\nget a\n\nget b\n", (0, 1, 1)),
        ("# why\n\nexists a\n\nget a\n\n", (1, 1, 0)),
        ("exists a\n\n\nget b", (1, 0, 1)),
        ("exists a\n\n# then\n\nget b", (1, 1, 0)),
        ("exists a\r\n \t\r\nget a\r\n", (1, 1, 0)),
        ("", (0, 0, 0)),
        ("exists a\n\nget a\n\nget b\n\n\n\n", (1, 1, 1)),
    ],
)
def test_parts(text: str, parts: tuple[int, int, int]) -> None:
    """An empty line ends a part; comments and leading empty lines do not."""
    found = parse_script(text, Encoding.TEXT)
    assert (len(found.compares), len(found.then), len(found.otherwise)) == parts


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("exist a", "line 1: 'exist a' is no comparison; these are: exists KEY"),
        ("exists a\n\nputt a b", "line 3: 'putt a b' is no operation; these are: get KEY"),
        ("seq a = x", "is no comparison"),
        ("exists ''", "'exists' needs a key"),
        ("seq a >= 1", "is no comparison"),
        ("empty", "is no comparison"),
        ("empty --end b --prefix a", "is no comparison"),
        ("get", "line 1: 'get' is no operation"),
        ("put a b --ttl 10", "line 1: '10' has no unit"),
        ("put a b c", "is no operation"),
        ("add n x", "is no operation"),
        ("touch a 10", "line 1: '10' has no unit"),
        ("delete --all", None),
        ("get 'a", "line 1: No closing quotation"),
        ("get a\n\nget b\n\nget c", "line 5: a transaction has 3 parts"),
        ("exists a\n\ntxn a", "a transaction cannot be nested in another"),
        ("exists a\n\nif 'exists a'", "a transaction cannot be nested in another"),
    ],
)
def test_an_unknown_line_is_refused(text: str, problem: str | None) -> None:
    """An unknown line is refused with the known forms."""
    if problem is None:
        assert parse_script(text, Encoding.TEXT) == Script(then=(Delete(b"--all"),))
        return
    with pytest.raises(NotationError) as refusal:
        parse_script(text, Encoding.TEXT)
    assert problem in str(refusal.value)
