"""Reports of a run: the table on the terminal, JSON, plots, BENCHMARKS.md and the history."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.bench import plots
from tests.bench.plan import Measure
from tests.bench.stage import ROOT

FOLDER = ROOT / ".cache" / "bench"
RESULTS = FOLDER / "results.json"
DOCUMENT = ROOT / "BENCHMARKS.md"
HISTORY = ROOT / "tests" / "bench" / "history.jsonl"
PLOTS = ROOT / "tests" / "bench" / "plots"
MEMORY = ROOT / "tests" / "bench" / "memory.json"

COLUMNS = 120
PREFACE = (
    "`make bench` measures, and writes this page. Each figure is a ratio to a peer or to a "
    "physical limit, measured in turns in the same run on the same machine: the median of the "
    "turns, and their quartiles in brackets. The value in brackets behind a target is what is "
    "hoped for. Keys have 16 bytes and values 100. CPU is that of the processes that serve; the "
    "load client is a small program in Go, the same for all servers but Redis."
)

Json = dict[str, Any]


def git(*argv: str) -> str:
    done = subprocess.run(["git", *argv], cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip()


def main(file: str, *, writes: bool) -> int:
    """Print the table of a run that is kept in `file`."""
    path = Path(file)
    if not path.exists():
        sys.stderr.write(f"{path} is not there: `python -m tests.bench run` writes it\n")
        return 2
    results = json.loads(path.read_text())
    for measure in results["measures"]:
        print(f"\n{measure['title']}\n{section(measure)}")
    print(summary_line(results))
    if writes:
        write_documents(results)
    return 0


def keep(results: Json, *, writes: bool) -> None:
    """Keep the results of a run; `writes` updates what belongs to the repository, too."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    RESULTS.write_text(json.dumps(results, indent=1, ensure_ascii=False) + "\n")
    plots.write(results, FOLDER)
    print(f"\nwritten: {RESULTS.relative_to(ROOT)}, and plots beside it")
    if writes:
        with HISTORY.open("a") as history:
            history.write(json.dumps(short(results), ensure_ascii=False) + "\n")
        write_documents(results)


def write_documents(results: Json) -> None:
    """Write BENCHMARKS.md and its plots."""
    DOCUMENT.write_text(document(results))
    plots.write(results, PLOTS)
    print(f"written: {DOCUMENT.name}")


def short(results: Json) -> Json:
    """Return the line of the history: date, commit, and the median of each goal."""
    return {
        "date": results["date"],
        "commit": results["commit"] + ("+" if results["is_changed"] else ""),
        "figures": {
            f"{measure['name']}/{goal['key']}": float(f"{goal['median']:.4g}")
            for measure in results["measures"]
            for goal in measure["goals"]
        },
    }


def listed(measures: Iterable[Measure]) -> str:
    lines = []
    for measure in measures:
        lines.append(f"{measure.name:16}{measure.title}{' (if it is named)' * measure.is_long}")
        lines += [f"{'':16}  {goal.text:60} {goal.target}" for goal in measure.goals]
    return "\n".join(lines)


def section(measure: Json) -> str:
    """Return the table of one measure for a terminal."""
    lines = [_goal_line(goal) for goal in measure["goals"]]
    figures = list(dict.fromkeys(name for side in measure["sides"].values() for name in side))
    if figures:
        lines.append("  " + " " * 34 + "".join(f"{figure:>16}" for figure in figures))
    for name, side in measure["sides"].items():
        cells = (shown(side[each]["median"]) if each in side else "" for each in figures)
        lines.append(f"    {name:32}" + "".join(f"{cell:>16}" for cell in cells))
    lines += [f"    {note}" for note in measure["notes"]]
    if measure["failure"]:
        lines.append(f"  FAILED: {measure['failure'].splitlines()[0]}")
    lines.append(f"  ({measure['took_s']:.0f} s)")
    return "\n".join(lines)


def _goal_line(goal: Json) -> str:
    mark = {True: "met", False: "MISSED", None: ""}[goal["is_met"]]
    spread = f"({shown(goal['lower'])} to {shown(goal['upper'])})" if goal["samples"] > 1 else ""
    value = f"{shown(goal['median'])}{goal['unit']}"
    return f"  {goal['text']:58}{value:>12} {spread:20}{goal['target']:>14} {mark}"


def shown(value: float) -> str:
    """Return three digits that count, without an exponent."""
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def summary_line(results: Json) -> str:
    goals = [goal for measure in results["measures"] for goal in measure["goals"]]
    met = sum(goal["is_met"] is True for goal in goals)
    missed = sum(goal["is_met"] is False for goal in goals)
    took_s = sum(measure["took_s"] for measure in results["measures"])
    return f"\n{met} targets met, {missed} missed, in {took_s:.0f} s"


def document(results: Json) -> str:
    """Return BENCHMARKS.md."""
    machine = results["machine"]
    missed = list(_missed(results["measures"]))
    where = (
        f"Commit `{results['commit']}`, {results['date'][:10]}: {machine['processors']} "
        f"processors with a load average of {machine['load']} before, Linux "
        f"{machine['kernel'].split('-')[0]}, Python {machine['python']}. "
        "Earlier runs are in [history.jsonl](tests/bench/history.jsonl)."
    )
    lines = [
        "# Benchmarks",
        "",
        textwrap.fill(PREFACE, COLUMNS),
        "",
        textwrap.fill(where, COLUMNS),
        "",
        "![Each figure in units of its target](tests/bench/plots/targets.svg)",
        "",
        "## Where a target is missed",
        "",
        *(missed or ["Nowhere."]),
        "",
    ]
    for measure in results["measures"]:
        lines += _chapter(measure)
    if MEMORY.exists():
        lines += _memory(json.loads(MEMORY.read_text()))
    return "\n".join(lines)


def _memory(found: Json) -> list[str]:
    text = (
        "`python -m tests.bench memory`: puts, batches, gets, scans, watches, failed conditions "
        f"and refused calls for {found['minutes']:g} minutes (commit `{found['commit']}`). The "
        f"memory of the writer was {'flat' if found['is_flat'] else '**not flat**'}: median "
        f"{found['median_mib']} MiB, most {found['most_mib']} MiB; idle it had "
        f"{found['idle_mib']} MiB, and its budget for data is {found['budget_mib']} MiB. It grew "
        f"by {found['slope_mib_per_hour']} MiB an hour, by a line through the last two thirds."
    )
    lines = [
        "## Memory under full load",
        "",
        textwrap.fill(text, COLUMNS),
        "",
        "![Resident memory](tests/bench/plots/memory.svg)",
        "",
        "| pauses | count | median | p99 | longest |",
        "|---|---|---|---|---|",
    ]
    for name, told in found["pauses"].items():
        label = f"collection, {name}" if name.startswith("generation") else name
        lines.append(
            f"| {label} | {told['count']:,} | {told['median_ms']} ms | {told['p99_ms']} ms "
            f"| {told['longest_ms']} ms |"
        )
    return [*lines, ""]


def _missed(measures: Sequence[Json]) -> Iterable[str]:
    for measure in measures:
        goals = [goal for goal in measure["goals"] if goal["is_met"] is False]
        if not goals:
            continue
        texts = [
            f"{goal['text']}: {shown(goal['median'])}{goal['unit']}, wanted {goal['target']}"
            for goal in goals
        ]
        text = f"- **{measure['title']}** — {'; '.join(texts)}. {measure['takes']}"
        yield textwrap.fill(text, COLUMNS, subsequent_indent="  ")


def _chapter(measure: Json) -> list[str]:
    lines = [f"## {_capital(measure['title'])}", ""]
    if measure["failure"]:
        return [*lines, "It could not be measured in this run.", ""]
    if measure["goals"]:
        lines += ["| | found | target | |", "|---|---|---|---|"]
        for goal in measure["goals"]:
            mark = {True: "met", False: "**missed**", None: ""}[goal["is_met"]]
            spread = f" ({shown(goal['lower'])} to {shown(goal['upper'])})"
            value = f"{shown(goal['median'])}{goal['unit']}{spread * (goal['samples'] > 1)}"
            lines.append(f"| {goal['text']} | {value} | {goal['target']} | {mark} |")
        lines.append("")
    lines += _sides(measure["sides"])
    for note in measure["notes"]:
        lines += [note, ""]
    return lines


def _sides(sides: Mapping[str, Json]) -> list[str]:
    figures = list(dict.fromkeys(name for side in sides.values() for name in side))
    if not figures:
        return []
    lines = ["| | " + " | ".join(figures) + " |", "|---" * (len(figures) + 1) + "|"]
    for name, side in sides.items():
        cells = [shown(side[each]["median"]) if each in side else "" for each in figures]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return [*lines, ""]


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]
