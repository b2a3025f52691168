"""Load by the Python client, in a process of its own."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from tests.bench.stage import Target, cpu_s, run

CLIENT = Path(__file__).parents[1] / "programs" / "python_client.py"


async def python_client(
    python: str, server: Target, way: str, calls: int, *shown: str
) -> Mapping[str, float]:
    """Make so many calls; return the figures of the client, and what they cost the server."""
    before_s = cpu_s(server.pids())
    output = await run(
        [python, str(CLIENT), server.address, way, str(calls), *shown], env={"PYTHONPATH": ""}
    )
    figures: dict[str, float] = json.loads(output.splitlines()[-1])
    done = calls + calls // 10  # the client begins with some that it does not measure
    return figures | {"server CPU us": (cpu_s(server.pids()) - before_s) / done * 1e6}
