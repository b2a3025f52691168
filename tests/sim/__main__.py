"""The simulation from the command line: campaigns of many seeds, and one seed told in full.

python -m tests.sim campaign --seeds 2000
python -m tests.sim replay database 17 --steps 12 --without scans
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence

import click

from tests.sim.campaign import SHARES, Tally, one_of_each_kind, run_campaign, scaled, shared, spread
from tests.sim.mutants.hunting import Survived, hunt_named
from tests.sim.mutants.registry import MUTANTS
from tests.sim.options import CHAOS_STEPS, CLIENTS, EVERYTHING, Options, Trouble
from tests.sim.outcomes import kind_of, silence_logs
from tests.sim.profiles import PROFILES
from tests.sim.run import Failure, attempt
from tests.sim.telling import ALL_LINES, explain, table
from tests.sim.trace import timeline

TEXT_SHOWN = 100
BATCH_SEEDS = 500  # after so many a long campaign says how far it is
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
    "--seeds", type=COUNT, default=2_000, show_default=True, help="How many, of all profiles."
)
@click.option(
    "--first", type=NUMBER, default=0, show_default=True, help="The first seed of each profile."
)
@click.option(
    "--hours", type=float, help="Go on with further seeds for so long, or until one fails."
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
    profiles: Sequence[str],
    processes: int | None,
) -> None:
    """Run many seeds, and say what they came to; failures are shrunk and told."""
    began_s = time.monotonic()
    end_s = began_s + (hours or 0.0) * 3_600
    chosen = {name: SHARES[name] for name in profiles or SHARES}
    batch = seeds if hours is None else min(seeds, BATCH_SEEDS)
    total: dict[str, Tally] = {}
    while True:
        shares = scaled(chosen, batch)
        for name, tally in run_campaign(shared(shares, first), processes=processes).items():
            total.setdefault(name, Tally()).merge(tally)
        first += max(shares.values())
        failures = [each for tally in total.values() for each in tally.failures]
        is_over = sum(tally.seeds for tally in total.values()) >= seeds
        if failures or (is_over and time.monotonic() >= end_s):
            break
        if hours is not None:
            click.echo(f"{time.monotonic() - began_s:8.0f} s  {_counted(total)}")
    click.echo(table(total))
    click.echo(f"{time.monotonic() - began_s:.0f} s")
    for failure in one_of_each_kind(failures):
        click.echo(f"\n{explain(failure)}")
    sys.exit(1 if failures else 0)


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
    """Run one seed and tell what happens, event by event, and how it ends."""
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
        told = ", ".join(repr(name) for name in sorted(unknown))
        text = f"no mutant is called {told}; RELIABILITY.md has a table of them"
        raise click.BadParameter(text, param_hint="NAMES")
    survivors = 0
    chosen = names or [*MUTANTS]
    for name, hunted in spread(hunt_named, chosen, processes=processes):
        survivors += isinstance(hunted, Survived)
        how = "survives" if isinstance(hunted, Survived) else f"{hunted.error[:TEXT_SHOWN]!r}"
        click.echo(f"{name}: {hunted.tried} seeds, {hunted.seconds:.1f} s: {how}")
    click.echo(f"{len(chosen) - survivors} of {len(chosen)} mutants caught")
    sys.exit(1 if survivors else 0)


def _counted(total: Mapping[str, Tally]) -> str:
    befallen = sum((tally.befallen for tally in total.values()), Counter[str]())
    return f"{sum(tally.seeds for tally in total.values())} seeds, {befallen['crashes']} crashes"


if __name__ == "__main__":
    main()
