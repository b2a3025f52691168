"""The house rules find what they are for, and leave alone what they are not for."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.style import rules
from tests.style.sources import Source

Rule = Callable[[Source], Iterator[str]]

LONG = "\n".join(f"    x{n} = {n}" for n in range(60))

BREAKS: list[tuple[Rule, str, str]] = [
    (rules.long_file, "a.py", "x = 1\n" * (rules.FILE_LINES_MAX + 1)),
    (rules.missing_docstring, "a.py", "x = 1\n"),
    (rules.vague_name, "store/utils.py", ""),
    (rules.vague_name, "store/file_manager.py", ""),
    (rules.long_function, "a.py", f"def f():\n{LONG}\n"),
    (rules.long_function, "a.py", f"async def f():\n{LONG}\n"),
    (rules.broad_except, "a.py", "try:\n    f()\nexcept Exception:\n    pass\n"),
    (rules.broad_except, "a.py", "try:\n    f()\nexcept:\n    pass\n"),
    (rules.broad_except, "a.py", "try:\n    f()\nexcept (OSError, BaseException):\n    pass\n"),
    (rules.broad_except, "a.py", "try:\n    f()\nexcept Exception:  # noqa: BLE001\n    pass\n"),
    (
        rules.broad_except,
        "a.py",
        "try:\n    f()\nexcept Exception:\n    def g():\n        raise KeyError\n",
    ),
    (rules.epoch_condition, "a.py", "x = a.writer_epoch < b\n"),
    (rules.epoch_condition, "a.py", "x = (a.id, a.epoch) == b\n"),
    (rules.epoch_condition, "a.py", "x = 1 <= epoch_min < log.epoch_at(2)\n"),
    (rules.epoch_condition, "a.py", "x = max(a, b.epoch)\n"),
    (rules.epoch_condition, "a.py", "if a and not b.writer_epoch:\n    pass\n"),
    (rules.impurity, "a.py", "import time\nx = time.time()\n"),
    (rules.impurity, "a.py", "import time as t\nx = t.monotonic()\n"),
    (rules.impurity, "a.py", "from time import sleep\nsleep(1)\n"),
    (rules.impurity, "a.py", "import random\nx = random.random()\n"),
    (rules.impurity, "a.py", "import uuid\nx = uuid.uuid4()\n"),
    (rules.impurity, "a.py", "from datetime import datetime\nx = datetime.now()\n"),
    (rules.impurity, "a.py", "with open('f') as f:\n    pass\n"),
    (rules.impurity, "a.py", "import os\nx = os.environ['A']\n"),
    (rules.impurity, "a.py", "async def f():\n    pass\n"),
    (rules.environment, "a.py", "import os\nx = os.environ.get('A')\n"),
    (rules.environment, "a.py", "from os import getenv\nx = getenv('A')\n"),
    (rules.loose_task, "a.py", "import asyncio\nasyncio.create_task(f())\n"),
    (rules.loose_task, "a.py", "loop.create_task(f())\n"),
    (rules.loose_task, "a.py", "group = asyncio\ngroup.create_task(f())\n"),
    (rules.loose_task, "a.py", "from asyncio import ensure_future\nensure_future(f())\n"),
    (rules.unfinished, "a.py", "x = 1  # TO" + "DO later\n"),
    (rules.unfinished, "a.py", "def f():\n    raise NotImplementedError\n"),
    (rules.unfinished, "a.py", "import pytest\n@pytest.mark.skip\ndef f(): ...\n"),
    (rules.unfinished, "a.py", "from pytest import mark\n@mark.xfail(strict=True)\ndef f(): ...\n"),
    (rules.sleeping, "a.py", "import time\ntime.sleep(0)\n"),
    (rules.sleeping, "a.py", "import asyncio\nawait asyncio.sleep(0.1)\n"),
    (rules.sleeping, "a.py", "from asyncio import sleep\nawait sleep(delay)\n"),
    (rules.unexplained_test, "a.py", "def test_f():\n    pass\n"),
    (rules.unexplained_test, "a.py", "class TestF:\n    def test_f(self):\n        pass\n"),
]

KEEPS: list[tuple[Rule, str, str]] = [
    (rules.long_file, "a.py", "x = 1\n" * rules.FILE_LINES_MAX),
    (rules.missing_docstring, "a/__init__.py", ""),
    (rules.vague_name, "store/database.py", ""),
    (rules.long_function, "a.py", "def f():\n    return 1\n"),
    (rules.broad_except, "a.py", "try:\n    f()\nexcept ValueError:\n    pass\n"),
    (rules.broad_except, "a.py", "try:\n    f()\nexcept Exception:\n    raise\n"),
    (
        rules.broad_except,
        "a.py",
        "try:\n    f()\nexcept Exception:  # noqa: BLE001 - the caller gets it\n    p()\n",
    ),
    (rules.epoch_condition, "a.py", "x = f(epoch=a.epoch) == 1\n"),
    (rules.epoch_condition, "a.py", "if since_epoch is None:\n    since_epoch = a.epoch\n"),
    (rules.impurity, "a.py", "def f(now_ms, time):\n    return now_ms + time\n"),
    (rules.impurity, "a.py", "import uuid\nx = uuid.UUID(int=1)\n"),
    (rules.environment, "a.py", "import os\nos.fsync(1)\n"),
    (
        rules.loose_task,
        "a.py",
        "async with asyncio.TaskGroup() as uploads:\n    uploads.create_task(f())\n",
    ),
    (
        rules.loose_task,
        "a.py",
        "def f(self, group: TaskGroup):\n    self._g = group\n    self._g.create_task(f())\n",
    ),
    (rules.unfinished, "a.py", "x = 'nothing'  # done\n"),
    (rules.sleeping, "a.py", "import asyncio\nawait asyncio.sleep(0)\n"),
    (rules.unexplained_test, "a.py", 'def test_f():\n    """One is one."""\n'),
]


@pytest.mark.parametrize(("rule", "name", "text"), BREAKS)
def test_rule_finds(rule: Rule, name: str, text: str) -> None:
    """A file that breaks a rule is found."""
    assert list(rule(Source.parse(name, text)))


@pytest.mark.parametrize(("rule", "name", "text"), KEEPS)
def test_rule_leaves_alone(rule: Rule, name: str, text: str) -> None:
    """A file that keeps a rule is not found."""
    assert list(rule(Source.parse(name, text))) == []
