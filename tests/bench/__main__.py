"""Benchmarks beside peers and physical limits: `python -m tests.bench run`.

list     the measures and their targets
run      measures; prints a table, and writes JSON, plots, BENCHMARKS.md and the history
report   prints the table of a run again, and writes what belongs to it
memory   full load for some minutes: memory and pauses of the garbage collector
"""

from __future__ import annotations

import argparse
import sys

from tests.bench import memory, report
from tests.bench.measures.all import MEASURES
from tests.bench.running import run_all


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bench", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("list")
    running = commands.add_parser("run")
    running.add_argument("names", nargs="*", help="measures; all that are not long without names")
    running.add_argument("--base", help="a working copy of the commit before, with its .venv")
    running.add_argument("--flags", default="", help="more flags of our servers")
    running.add_argument("--tiny", action="store_true", help="only show that the measures work")
    running.add_argument(
        "--write", action="store_true", help="update BENCHMARKS.md and the history"
    )
    reporting = commands.add_parser("report")
    reporting.add_argument("file", nargs="?", default=str(report.RESULTS))
    reporting.add_argument("--write", action="store_true", help="update BENCHMARKS.md")
    remembering = commands.add_parser("memory")
    remembering.add_argument("--minutes", type=float, default=30.0)
    remembering.add_argument("--write", action="store_true", help="update what the page shows")
    given = parser.parse_args(argv)
    if given.command == "list":
        print(report.listed(MEASURES))
        return 0
    if given.command == "report":
        return report.main(given.file, writes=given.write)
    if given.command == "memory":
        return memory.main(given.minutes, writes=given.write)
    if given.write and (given.names or given.tiny):
        parser.error("--write is for a whole run")
    return run_all(given)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
