"""Callers of the write-ahead log use its values; few ask whether the log is in safekeepers."""

from __future__ import annotations

import ast

from tests.style.imports import modules

# Creating, opening and switching are about the mode; the last two hold a part of the writer that
# exists only with safekeepers. Others use values: of `WriteAheadLog`, of `Configuration`, or
# `Manifest.is_log_in_store`.
ASKING = frozenset(
    {
        "shalekv.settings",
        "shalekv.cli.process.writer",
        "shalekv.server.database",
        "shalekv.write.opening",
        "shalekv.protocol.quorum.opening",
        "shalekv.jobs.switch_wal",
        "shalekv.cli.commands.safekeeper_switch",
        "shalekv.write.engine",
        "shalekv.server.status",
    }
)
OWNERS = (
    "shalekv.protocol.manifest",
    "shalekv.protocol.membership",
    "shalekv.write.wal",
    "shalekv.write.quorum",
)
_WORDS = {"wal_mode", "safekeepers", "WalMode", "WalChoice", "QuorumWal", "ObjectStoreWal"}


def test_few_modules_ask_for_the_wal_mode() -> None:
    """Only the modules named here compare a WAL mode, the type of a log, or a part with None."""
    asking = {
        module.name
        for module in modules().values()
        if not module.name.startswith(OWNERS)
        if any(map(_asks, ast.walk(module.source.tree)))
    }
    assert asking == ASKING


def _asks(node: ast.AST) -> bool:
    is_question = isinstance(node, ast.Compare) or (
        isinstance(node, ast.Call) and ast.unparse(node.func) == "isinstance"
    )
    return is_question and not _WORDS.isdisjoint(map(_word, ast.walk(node)))


def _word(node: ast.AST) -> str:
    match node:
        case ast.Name(id=word) | ast.Attribute(attr=word):
            return word
    return ""
