"""The simulation from the command line: campaigns of many seeds, and a replay of one seed.

python -m tests.sim campaign --seeds 2000
python -m tests.sim campaign --seconds 180
python -m tests.sim replay database 17 --steps 12 --without scans
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence

import click

from tests.kit.seeds import random_of, run_seed
from tests.sim.campaign import (
    AHEAD,
    CORE_SHARE,
    PROFILES,
    SHARES,
    WEIGHTS,
    Tally,
    Task,
    TimeBox,
    kind_of,
    one_of_each_kind,
    run_campaign,
    scaled,
    shared,
    silence_logs,
    spread,
    total_of,
)
from tests.sim.mutants.hunting import Survived, hunt_named
from tests.sim.mutants.registry import MUTANTS
from tests.sim.options import CHAOS_STEPS, CLIENTS, EVERYTHING, Options, Trouble
from tests.sim.reporting import ALL_LINES, Progress, explain, simulated, table
from tests.sim.run import Failure, attempt
from tests.sim.trace import timeline

TEXT_SHOWN = 100
SEEDS = 2_000
CRASHES_MIN = 20_000  # in a campaign with this many seeds of all profiles
ROUND_SEEDS = 500  # of a campaign that runs for hours
INTERRUPTED = 130  # the status of shells
NUMBER, COUNT = click.IntRange(min=0), click.IntRange(min=1)
PROCESSES = click.option(
    "--processes", type=COUNT, help="How many at once; without this option one for each core."
)


@click.group()
def main() -> None:
    """Run the database in the simulation."""
    silence_logs()


@main.command()
@click.option(
    "--seeds", type=COUNT, default=SEEDS, show_default=True, help="How many, of all profiles."
)
@click.option(
    "--first", type=NUMBER, default=0, show_default=True, help="The first seed of each profile."
)
@click.option(
    "--hours", type=float, help="Go on with further seeds for so long, or until some fail."
)
@click.option(
    "--seconds",
    type=float,
    help="Instead as many new seeds as fit into so many seconds.",
)
@click.option(
    "--profile",
    "profiles",
    multiple=True,
    type=click.Choice([*PROFILES]),
    help="Only this one; more than once if need be.",
)
@PROCESSES
def campaign(
    seeds: int,
    first: int,
    hours: float | None,
    seconds: float | None,
    profiles: Sequence[str],
    processes: int | None,
) -> None:
    """Run many seeds and print the results; failures are shrunk and explained."""
    began_s = time.monotonic()
    end_s = None if hours is None else began_s + hours * 3_600
    began_with = simulated()
    tallies: dict[str, Tally] = {}
    progress = Progress(tallies, click.echo)
    is_whole = True
    if seconds is None:
        tasks = _tasks(profiles, seeds, first, end_s)
    else:
        click.echo(f"seed of the run: {run_seed()}")
        weights = {name: WEIGHTS[name] for name in profiles or WEIGHTS}
        tasks = TimeBox(seconds, random_of("campaign"), tallies, weights).tasks()
    try:
        run_campaign(
            tasks,
            processes=processes,
            into=tallies,
            seen=progress.see,
            ahead=AHEAD if seconds is None else 2,
        )
    except KeyboardInterrupt:
        is_whole = False
    click.echo(table(tallies, began_with))
    click.echo(f"{time.monotonic() - began_s:.0f} s")
    if not is_whole:
        click.echo("interrupted")
        sys.exit(INTERRUPTED)
    total = total_of(tallies.values())
    for failure in one_of_each_kind(total.failures):
        click.echo(f"\n{explain(failure)}")
    is_full = seconds is None and seeds >= SEEDS and not profiles
    if is_full and not total.failures and total.befallen["crashes"] < CRASHES_MIN:
        click.echo(f"only {total.befallen['crashes']} crashes, and not {CRASHES_MIN}")
        sys.exit(1)
    sys.exit(1 if total.failures else 0)


def _tasks(profiles: Sequence[str], seeds: int, first: int, end_s: float | None) -> Iterator[Task]:
    """Yield `seeds` tasks, then more until the time is over.

    Without `profiles` all are run, and in addition `CORE_SHARE` times as many of the core of the
    quorum WAL.
    """
    chosen = {name: SHARES.get(name, 1) for name in profiles or SHARES}
    size = seeds if end_s is None else min(seeds, ROUND_SEEDS)
    shares = scaled(chosen, size)
    left = seeds
    if not profiles:
        shares["quorum_core"] = CORE_SHARE * size
        left += CORE_SHARE * seeds
    while left > 0 or (end_s is not None and time.monotonic() < end_s):
        for task in shared(shares, first):
            yield task
            left -= 1
            if left <= 0 and end_s is not None and time.monotonic() >= end_s:
                return
        first += max(shares.values())


@main.command()
@click.argument("profile", type=click.Choice([*PROFILES]))
@click.argument("seed", type=int)
@click.option(
    "--steps",
    type=NUMBER,
    default=CHAOS_STEPS,
    show_default=True,
    help="How long the chaos lasts: so many steps, times a factor that the seed draws.",
)
@click.option(
    "--clients", type=NUMBER, default=CLIENTS, show_default=True, help="How many use the writers."
)
@click.option(
    "--without",
    "left_out",
    multiple=True,
    type=click.Choice([each.value for each in Trouble]),
    help="A kind of trouble that does not happen; more than once if need be.",
)
@click.option(
    "--lines", type=COUNT, help="Tell so many of the last events; without this option all."
)
def replay(
    profile: str, seed: int, steps: int, clients: int, left_out: Sequence[str], lines: int | None
) -> None:
    """Run one seed; print its events one by one, and the result."""
    without = frozenset(Trouble(each) for each in left_out)
    options = Options(steps, clients, EVERYTHING - without)
    run = attempt(seed, PROFILES[profile], options=options, keep_lines=lines or ALL_LINES)
    click.echo(f"{timeline(run.events)}\n")
    if isinstance(run, Failure):
        click.echo(f"{kind_of(run.error)}: {run.error!r}")
        sys.exit(1)
    click.echo(f"seed {seed}: all is well after {run.virtual_s:.1f} s, {run.steps} callbacks")
    click.echo(f"trace {run.trace_hash}; {dict(run.befallen)}")


@main.command()
@click.argument("names", nargs=-1)
@PROCESSES
def mutants(names: Sequence[str], processes: int | None) -> None:
    """Plant each mutant, or those of these names, and see whether the simulation notices."""
    unknown = set(names) - set(MUTANTS)
    if unknown:
        names = ", ".join(repr(name) for name in sorted(unknown))
        text = f"no mutant is called {names}; RELIABILITY.md has a table of them"
        raise click.BadParameter(text, param_hint="NAMES")
    survivors = 0
    chosen = names or [*MUTANTS]
    for name, hunted in spread(hunt_named, chosen, processes=processes):
        survivors += isinstance(hunted, Survived)
        how = "survives" if isinstance(hunted, Survived) else f"{hunted.error[:TEXT_SHOWN]!r}"
        click.echo(f"{name}: {hunted.tried} seeds, {hunted.seconds:.1f} s: {how}")
    click.echo(f"{len(chosen) - survivors} of {len(chosen)} mutants caught")
    sys.exit(1 if survivors else 0)


if __name__ == "__main__":
    main()
