"""The names that `shalekv_client` exports: each is imported with its module, when it is used."""

import ast
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

import shalekv_client


def imported_for_checkers() -> dict[str, str]:
    """The module of each name, by the imports that only type checkers see."""
    assert shalekv_client.__file__
    tree = ast.parse(Path(shalekv_client.__file__).read_text())
    block = next(statement for statement in tree.body if isinstance(statement, ast.If))
    return {
        alias.name: statement.module or ""
        for statement in block.body
        if isinstance(statement, ast.ImportFrom)
        for alias in statement.names
    }


def test_a_public_name_is_the_object_that_type_checkers_see() -> None:
    """Every name of `__all__`, and no other, is the object of the module of its import."""
    modules = imported_for_checkers()
    assert sorted([*modules, "__version__"]) == sorted(shalekv_client.__all__)
    for name, module in modules.items():
        assert getattr(shalekv_client, name) is getattr(import_module(module), name), name


def test_a_name_is_listed_before_it_is_used_and_another_one_is_refused() -> None:
    """`dir` lists what was not imported yet; a module is an attribute; a wrong name is an error."""
    program = """
import shalekv_client, sys
assert "shalekv_client.client" not in sys.modules
assert {"Client", "Status"} <= set(dir(shalekv_client))
assert issubclass(shalekv_client.errors.Fenced, shalekv_client.ShaleKVError)
assert "shalekv_client.client" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", program], check=True)
    wrong = "Klient"
    with pytest.raises(AttributeError, match="'shalekv_client' has no attribute 'Klient'"):
        getattr(shalekv_client, wrong)
