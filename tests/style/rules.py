"""The mechanical house rules: each takes a source and yields what breaks the rule in it."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from tests.style.sources import Source

FILE_LINES_MAX = 600
FUNCTION_LINES_MAX = 60

_VAGUE = frozenset(
    "util utils helper helpers common base misc manager managers handler handlers".split()
)
_UNFINISHED = re.compile(r"\b(TODO|FIXME|XXX)\b")
_SKIPS = frozenset(
    name
    for skip in ("skip", "skipif", "xfail", "importorskip", "skipIf", "skipUnless")
    for name in (f"pytest.{skip}", f"pytest.mark.{skip}", f"unittest.{skip}")
)
_IMPURE_MODULES = frozenset(
    "asyncio concurrent logging multiprocessing os pathlib random secrets shutil signal socket "
    "structlog subprocess tempfile threading time".split()
)
_IMPURE_CALLS = frozenset(
    "builtins.open builtins.print builtins.input io.open uuid.uuid1 uuid.uuid4 datetime.date.today "
    "datetime.datetime.now datetime.datetime.utcnow datetime.datetime.today".split()
)
_REASON = re.compile(r"#.*?[a-z]\w* \w+ \w+")  # at least three words

_Function = ast.FunctionDef | ast.AsyncFunctionDef


def long_file(source: Source) -> Iterator[str]:
    lines = source.text.count("\n")
    if lines > FILE_LINES_MAX:
        yield source.at(1, f"{lines} lines")


def missing_docstring(source: Source) -> Iterator[str]:
    """A module has a docstring; an empty package need not."""
    if source.text.strip() and ast.get_docstring(source.tree) is None:
        yield source.at(1, "no docstring")


def vague_name(source: Source) -> Iterator[str]:
    stem = source.name.rsplit("/", 1)[-1].removesuffix(".py")
    for word in _VAGUE.intersection(stem.split("_")):
        yield source.at(1, f"the name says '{word}'")


def long_function(source: Source) -> Iterator[str]:
    for node in ast.walk(source.tree):
        if isinstance(node, _Function) and node.end_lineno is not None:
            lines = node.end_lineno - node.lineno + 1
            if lines > FUNCTION_LINES_MAX:
                yield source.at(node.lineno, f"{node.name} has {lines} lines")


def broad_except(source: Source) -> Iterator[str]:
    """A handler of every error raises again, or gives its reason on the same line."""
    for node in ast.walk(source.tree):
        if not isinstance(node, ast.ExceptHandler) or not _catches_all(node):
            continue
        raises = any(isinstance(n, ast.Raise) for n in _own_nodes(node))
        comment = source.comments.get(node.lineno, "")
        reason = re.sub(r"noqa: [A-Z0-9, ]+", "", comment)
        if not raises and not _REASON.search(reason):
            yield source.at(node.lineno, "catches all, and neither raises nor says why")


def epoch_condition(source: Source) -> Iterator[str]:
    """Consequences of an epoch are decided in `protocol`; elsewhere none is compared or tested."""
    for node in ast.walk(source.tree):
        judged: list[ast.expr] = []
        match node:
            case ast.Compare(ops=[ast.Is() | ast.IsNot()]):
                pass  # whether there is one
            case ast.Compare(left=left, comparators=others):
                judged = [left, *others]
            case ast.Call(func=ast.Name(id="max" | "min"), args=args):
                judged = args
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                judged = [operand]
            case ast.If(test=test) | ast.IfExp(test=test) | ast.While(test=test):
                judged = [test]
            case ast.BoolOp(values=values):
                judged = values
        if any(map(_is_epoch, judged)):
            yield source.at(judged[0].lineno, "decides by an epoch")


def _is_epoch(node: ast.expr) -> bool:
    match node:
        case ast.Attribute(attr=name) | ast.Name(id=name) | ast.Call(func=ast.Attribute(attr=name)):
            return name in ("epoch", "epoch_at") or name.endswith("_epoch")
        case ast.Tuple(elts=elements) | ast.List(elts=elements):
            return any(map(_is_epoch, elements))
    return False


def impurity(source: Source) -> Iterator[str]:
    """Pure code does no I/O, reads no clock, draws no random numbers, awaits nothing."""
    for use, name in _names(source.tree):
        if name.split(".", 1)[0] in _IMPURE_MODULES or name in _IMPURE_CALLS:
            yield source.at(use.lineno, name)
    for node in ast.walk(source.tree):
        if isinstance(node, ast.AsyncFunctionDef | ast.Await | ast.AsyncFor | ast.AsyncWith):
            yield source.at(node.lineno, "async")


def environment(source: Source) -> Iterator[str]:
    for node, name in _names(source.tree):
        if name.startswith(("os.environ", "os.getenv", "os.putenv")):
            yield source.at(node.lineno, name)


def loose_task(source: Source) -> Iterator[str]:
    """A task is started by a task group: by a name that is opened or annotated as one."""
    groups = _task_groups(source.tree)
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Call):
            receiver, _, method = ast.unparse(node.func).rpartition(".")
            is_start = method in {"create_task", "ensure_future"}
            if is_start and receiver.rpartition(".")[2] not in groups:
                yield source.at(node.lineno, f"{receiver}.{method}".lstrip("."))


def unfinished(source: Source) -> Iterator[str]:
    """Nothing is left for later, and no test is left out."""
    for line, comment in source.comments.items():
        if _UNFINISHED.search(comment):
            yield source.at(line, comment)
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Module | ast.ClassDef | _Function):
            found = _UNFINISHED.search(ast.get_docstring(node) or "")
            if found:
                yield source.at(getattr(node, "lineno", 1), found.group())
    for use, name in _names(source.tree):
        if name == "builtins.NotImplementedError" or name in _SKIPS:
            yield source.at(use.lineno, name)


def unfinished_text(name: str, text: str) -> Iterator[str]:
    for number, line in enumerate(text.splitlines(), 1):
        found = _UNFINISHED.search(line)
        if found:
            yield f"{name}:{number}: {found.group()}"


def sleeping(source: Source) -> Iterator[str]:
    """A test waits for what it needs, not for time to pass; `asyncio.sleep(0)` only yields."""
    calls = {id(n.func): n for n in ast.walk(source.tree) if isinstance(n, ast.Call)}
    for node, name in _names(source.tree):
        call = calls.get(id(node))
        arguments = [ast.unparse(a) for a in call.args] if call else []
        if name == "time.sleep" or (name == "asyncio.sleep" and arguments != ["0"]):
            yield source.at(node.lineno, name)


def unexplained_test(source: Source) -> Iterator[str]:
    for node in ast.walk(source.tree):
        if isinstance(node, _Function) and node.name.startswith("test_"):
            sentence = ast.get_docstring(node) or ""
            if not sentence.rstrip().endswith("."):
                yield source.at(node.lineno, node.name)


def _catches_all(node: ast.ExceptHandler) -> bool:
    types = node.type.elts if isinstance(node.type, ast.Tuple) else [node.type]
    return any(t is None or ast.unparse(t) in {"Exception", "BaseException"} for t in types)


def _task_groups(tree: ast.Module) -> set[str]:
    """The last names of the variables and attributes that are task groups."""
    groups: set[str] = set()
    nodes = list(ast.walk(tree))
    for node in nodes + nodes:  # twice, since an alias may come before its definition
        match node:
            case ast.withitem(context_expr=kind, optional_vars=ast.expr() as target):
                pass
            case ast.arg(arg=name, annotation=ast.expr() as kind):
                target = ast.Name(name)
            case ast.AnnAssign(target=target, annotation=kind):
                pass
            case ast.Assign(targets=[target], value=ast.Name(id=name)) if name in groups:
                kind = ast.Name("TaskGroup")
            case _:
                continue
        if "TaskGroup" in ast.unparse(kind):
            groups.add(ast.unparse(target).rpartition(".")[2])
    return groups


def _own_nodes(node: ast.AST) -> Iterator[ast.AST]:
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, _Function | ast.Lambda):
            yield child
            yield from _own_nodes(child)


def _names(tree: ast.Module) -> Iterator[tuple[ast.Name | ast.Attribute, str]]:
    """Yield each use of an imported name with its full dotted name, whatever it was imported as.

    A bare name that was not imported counts as a builtin; the attributes of a variable are left
    out.
    """
    full: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            full |= {a.asname: a.name for a in node.names if a.asname}
            full |= {(n := a.name.split(".")[0]): n for a in node.names if not a.asname}
        elif isinstance(node, ast.ImportFrom):
            full |= {a.asname or a.name: f"{node.module}.{a.name}" for a in node.names}
    for use in ast.walk(tree):
        if isinstance(use, ast.Name):
            yield use, full.get(use.id, f"builtins.{use.id}")
        elif isinstance(use, ast.Attribute):
            first, rest = _split(use)
            if first in full:
                yield use, full[first] + rest


def _split(node: ast.Attribute) -> tuple[str, str]:
    """`a.b.c` as ("a", ".b.c"); the first part is empty when it is not a plain name."""
    rest = ""
    part: ast.expr = node
    while isinstance(part, ast.Attribute):
        rest = f".{part.attr}{rest}"
        part = part.value
    return (part.id if isinstance(part, ast.Name) else ""), rest
