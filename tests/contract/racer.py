"""A process that races others for names: reads them from standard input, answers who got them.

Started as ``python -m tests.contract.racer <folder> <own name>``.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from random import SystemRandom

from shalekv.clock import LoopClock
from shalekv.runtime import Runtime, ThreadWorkers
from shalekv.store.claim import Claimed, claim
from shalekv.store.local import LocalStore


async def answer(store: LocalStore, runtime: Runtime, own: str, name: str) -> str:
    """Who holds `name`, as far as this process can tell."""
    write_id = f"{own} {runtime.random.getrandbits(64)}".encode()
    outcome = await claim(store, name, write_id, runtime=runtime)
    holder = write_id if isinstance(outcome, Claimed) else outcome.data
    return f"{'won' if isinstance(outcome, Claimed) else 'lost'} {holder.decode()}"


def main() -> None:
    """Answer line for line, until the input ends."""
    folder, own = sys.argv[1:]
    workers = ThreadWorkers(1)
    runtime = Runtime(LoopClock(), SystemRandom(), workers)
    store = LocalStore(Path(folder), runtime)
    with asyncio.Runner() as runner:
        for line in sys.stdin:
            reply = runner.run(answer(store, runtime, own, line.strip()))
            sys.stdout.write(f"{reply}\n")
            sys.stdout.flush()
    workers.close()


if __name__ == "__main__":
    main()
