"""The house rules that a machine can check, over every file of the repository."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Iterator

import pytest

from tests.style import rules
from tests.style.allowed import ALLOWED
from tests.style.sources import ROOT, Source, file_names, lock_files, python_sources, texts

Rule = Callable[[Source], Iterator[str]]

SERVER = "server/shalekv/"
PURE = (SERVER + "protocol/", SERVER + "format/")


def broken(rule: Rule, *folders: str, but: str = "nothing") -> list[str]:
    """Return the violations of `rule` in the files under `folders`, all if none is given, except
    `but`.
    """
    allowed = ALLOWED.get(rule.__name__, {})
    sources = [s for s in python_sources() if not folders or s.name.startswith(folders)]
    judged = [s for s in sources if s.name not in allowed and not s.name.startswith(but)]
    return [f for s in judged for f in rule(s)]


@pytest.mark.parametrize(
    "rule",
    [
        rules.long_file,
        rules.missing_docstring,
        rules.vague_name,
        rules.long_function,
        rules.broad_except,
        rules.unfinished,
    ],
)
def test_rule_holds_everywhere(rule: Rule) -> None:
    """Every Python file keeps the rules on size, names, docstrings, errors and loose ends."""
    assert broken(rule) == []


def test_protocol_and_format_are_pure() -> None:
    """`protocol` and `format` do no I/O, read no clock, draw no random numbers, await nothing."""
    assert broken(rules.impurity, *PURE) == []


def test_epochs_are_judged_in_protocol() -> None:
    """No executor has a condition on an epoch: what follows from one is decided in `protocol`."""
    assert broken(rules.epoch_condition, SERVER, "clients/spark/", but=SERVER + "protocol/") == []


def test_environment_is_read_in_cli_only() -> None:
    """Environment variables are an input of the command line and of nothing below it."""
    assert broken(rules.environment, SERVER, "clients/python/", but=SERVER + "cli/") == []


def test_tasks_live_in_a_task_group() -> None:
    """No task of the server can outlive its owner or lose its error."""
    assert broken(rules.loose_task, SERVER) == []


def test_tests_do_not_sleep() -> None:
    """No test rests on time passing."""
    assert broken(rules.sleeping, "tests/") == []


def test_tests_state_their_property() -> None:
    """Every test has a docstring that is a sentence."""
    assert broken(rules.unexplained_test, "tests/") == []


def test_allowed_exceptions_are_needed() -> None:
    """Each exception in allowed.py has a reason, and is still one."""
    by_name = {s.name: s for s in python_sources()}
    stale = [
        (name, file)
        for name, files in ALLOWED.items()
        for file, reason in files.items()
        if not reason or file not in by_name or not any(getattr(rules, name)(by_name[file]))
    ]
    assert stale == []


def test_nothing_is_left_for_later() -> None:
    """No text but Python's, which has a rule of its own, holds a mark of unfinished work."""
    others = [(n, t) for n, t in texts() if not n.endswith(".py") and n != "LICENSE"]
    assert [f for n, t in others for f in rules.unfinished_text(n, t)] == []


def test_no_text_names_a_place_on_one_machine() -> None:
    """The repository does not contain the paths of a machine."""
    private = re.compile(r"(?<![\w.)}])/(?:home|root|work|Users)/\w+")
    found = [
        f"{name}:{number}: {line.strip()}"
        for name, text in texts()
        for number, line in enumerate(text.splitlines(), 1)
        if private.search(line)
    ]
    assert found == []


def test_locks_name_no_host() -> None:
    """A lock pins what is installed, by hash, and leaves the choice of a mirror to the user."""
    assert [name for name, text in lock_files() if "://" in text] == []


def test_test_folders_are_packages() -> None:
    """Every folder with tests is a package, so that tests can import from each other."""
    files = set(file_names())
    folders = {n.rsplit("/", 1)[0] for n in files if n.startswith("tests/") and n.endswith(".py")}
    assert [f for f in sorted(folders) if f + "/__init__.py" not in files] == []


def test_test_folders_are_run() -> None:
    """`make test` runs every folder of tests; benchmarks run when they are asked for."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    listed = set(project["tool"]["pytest"]["ini_options"]["testpaths"])
    tests = [n for n in file_names() if re.fullmatch(r"tests/.*/test_\w+\.py", n)]
    assert {"/".join(n.split("/")[:2]) for n in tests} <= listed | {"tests/bench"}
