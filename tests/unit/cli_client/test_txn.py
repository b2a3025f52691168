"""`shalekv txn`: its notation, and what it sends and prints."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shalekv.cli.get import get
from shalekv.cli.keys import Encoding
from shalekv.cli.put import put
from shalekv.cli.txn import txn
from shalekv.cli.txn_notation import NotationError, Script, parse_script
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
    ValueIs,
)
from tests.kit.serving.dict_server import DictServer
from tests.unit.cli_client.conftest import Run

EXAMPLE = Path(__file__).parents[3] / "examples" / "reserve_seat.txn"

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

delete a
delete --prefix p
delete --start s
delete --end e
"""


def test_every_line_of_the_notation() -> None:
    """Each form is read as what it says."""
    found = parse_script(EVERYTHING, Encoding.TEXT)
    assert found.compares == (
        Exists(b"a"),
        Missing(b"b b"),
        SeqIs(b"a", 12, Operator.EQUAL),
        SeqIs(b"a", 0, Operator.NOT_EQUAL),
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
    )
    assert found.otherwise == (
        Delete(b"a"),
        DeleteRange(prefix=b"p"),
        DeleteRange(start=b"s"),
        DeleteRange(end=b"e"),
    )


@given(st.text(st.characters(codec="utf-8", exclude_characters="\n"), min_size=1))
def test_any_word_can_be_quoted(word: str) -> None:
    """What a shell would take as one word is one key."""
    script = parse_script(f"get {shlex.quote(word)}", Encoding.TEXT)
    assert script.then == (Get(word.encode()),)


@given(st.binary(min_size=1, max_size=9), st.sampled_from(Encoding))
def test_any_bytes_can_be_spelled(key: bytes, encoding: Encoding) -> None:
    """The encodings hold for the words of the notation."""
    if encoding is not Encoding.TEXT:
        script = parse_script(f"get {shlex.quote(encoding.encode(key))}", encoding)
        assert script.then == (Get(key),)


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
    """An empty line ends a part; comments and what comes before the first line are none."""
    found = parse_script(text, Encoding.TEXT)
    assert (len(found.compares), len(found.then), len(found.otherwise)) == parts


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("exist a", "line 1: 'exist a' is no comparison; these are: exists KEY"),
        ("exists a\n\nputt a b", "line 3: 'putt a b' is no operation; these are: get KEY"),
        ("seq a = x", "is no comparison"),
        ("seq a >= 1", "is no comparison"),
        ("empty", "is no comparison"),
        ("empty --end b --prefix a", "is no comparison"),
        ("get", "line 1: 'get' is no operation"),
        ("put a b --ttl 10", "line 1: '10' is no time with a unit"),
        ("put a b c", "is no operation"),
        ("add n x", "is no operation"),
        ("delete --all", None),
        ("get 'a", "line 1: No closing quotation"),
        ("get a\n\nget b\n\nget c", "line 5: a transaction has 3 parts"),
        ("exists a\n\ntxn a", "a transaction cannot stand inside another"),
        ("exists a\n\nif 'exists a'", "a transaction cannot stand inside another"),
    ],
)
def test_what_is_no_transaction_is_told_by_its_line(text: str, problem: str | None) -> None:
    """A line that is none of the forms is refused, with what there is."""
    if problem is None:
        assert parse_script(text, Encoding.TEXT) == Script(then=(Delete(b"--all"),))
        return
    with pytest.raises(NotationError) as refusal:
        parse_script(text, Encoding.TEXT)
    assert problem in str(refusal.value)


async def test_the_branch_is_told(run: Run, server: DictServer) -> None:
    """Exit code 0 and then, or 13 and else; each with the results of its operations."""
    args = ["--if", "missing k", "--then", "put k 'a b'", "--then", "add n", "--else", "get k"]
    first = await run(txn, *args)
    assert (first.exit_code, first.stdout) == (0, "then\t1\nput\tk\t\t\nadd\tn\t1\t\n")
    assert server.state.data[b"k"].value == b"a b"
    second = await run(txn, *args)
    assert (second.exit_code, second.stdout) == (13, "else\t1\nget\tk\ta b\t1\n")
    table = await run(txn, *args, "--format", "table")
    assert table.stdout.splitlines() == [
        "else, seq 1",
        "operation  key  value  seq",
        "get        k    a b      1",
    ]


async def test_json_has_it_all(run: Run) -> None:
    """One object with the branch, and a result for each of its operations in their order."""
    await run(put, "k", "-", stdin=b"\xff")
    operations = ["get k", "get none", "add n 5", "delete k", "delete --prefix x", "put e ''"]
    args = [word for operation in operations for word in ("--then", operation)]
    found = json.loads((await run(txn, *args, "--format", "json")).stdout)
    assert found == {
        "branch": "then",
        "seq": 2,
        "results": [
            {
                "operation": "get",
                "key": "k",
                "found": True,
                "value_base64": "/w==",
                "seq": 1,
                "expire_at_ms": None,
            },
            {"operation": "get", "key": "none", "found": False},
            {"operation": "add", "key": "n", "value": 5},
            {"operation": "delete", "key": "k"},
            {"operation": "delete", "prefix": "x"},
            {"operation": "put", "key": "e"},
        ],
    }


async def test_encodings_and_durability(run: Run, server: DictServer) -> None:
    """The flags of other commands mean the same here."""
    args = ["--hex", "--if", "missing 00", "--then", "put 00 ff", "--durability", "archived"]
    assert (await run(txn, *args)).exit_code == 0
    assert server.state.data[b"\x00"].value == b"\xff"
    quoted = ["--escaped", "--if", r'exists "\x00"', "--then", r"get '\x00'"]
    assert (await run(txn, *quoted)).stdout == "then\t1\nget\t\\x00\t\\xff\t1\n"


async def test_a_file_and_flags_add_up(run: Run, server: DictServer, tmp_path: Path) -> None:
    """A file, or standard input, comes first; what the flags say comes behind it."""
    path = tmp_path / "script"
    path.write_text("missing k\n\nput k from-file\n")
    result = await run(txn, str(path), "--if", "missing l", "--then", "put l from-flag")
    assert result.exit_code == 0
    assert len(server.state.requests[-1].compares) == 2
    assert {key: entry.value for key, entry in server.state.data.items()} == {
        b"k": b"from-file",
        b"l": b"from-flag",
    }
    result = await run(txn, "-", "--else", "get l", stdin=b"missing k\n\nput k from-stdin\n")
    assert (result.exit_code, result.stdout) == (13, "else\t1\nget\tl\tfrom-flag\t1\n")


async def test_bytes_of_a_file_arrive(run: Run, server: DictServer, tmp_path: Path) -> None:
    """A file that is not UTF-8 is taken byte by byte."""
    path = tmp_path / "script"
    path.write_bytes(b"put k '\xff \xc3\xa4'\n")
    await run(txn, str(path))
    assert server.state.data[b"k"].value == b"\xff \xc3\xa4"


@pytest.mark.parametrize(
    ("args", "problem"),
    [
        ([], "there is nothing to do"),
        (["--if", "exists k"], "there is nothing to do"),
        (["--then", "get"], "--then: 'get' is no operation"),
        (["--if", "get k", "--then", "get k"], "--if: 'get k' is no comparison"),
        (["--hex", "--else", "get zz"], "--else: 'zz' is not hexadecimal"),
        (["--then", "txn --then 'get k'"], "cannot stand inside another"),
    ],
)
async def test_wrong_flags_are_refused(
    run: Run, server: DictServer, args: list[str], problem: str
) -> None:
    """A usage error that names the flag, and nothing is sent."""
    result = await run(txn, *args)
    assert result.exit_code == 2
    assert problem in result.stderr
    assert server.state.requests == []


async def test_the_example_works(run: Run) -> None:
    """The first reservation gets the seat, the second one is told whose it is."""
    assert (await run(txn, str(EXAMPLE))).exit_code == 0
    second = await run(txn, str(EXAMPLE))
    assert second.exit_code == 13
    assert "Ada Lovelace" in second.stdout
    assert (await run(get, "flight/LX38/reserved", "--as-int64")).stdout == "1\n"
