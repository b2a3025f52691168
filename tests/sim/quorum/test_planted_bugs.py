"""The simulation of the quorum core detects each rule that is removed.

A bug counts as caught when some seed below `SEEDS_MAX` breaks an invariant. Two are left to their
scenarios: that a log behind the archive is refused matters when a majority has lost its records,
and the mode of the WAL is not switched here.
"""

from __future__ import annotations

import pytest

from tests.sim.planting import planted
from tests.sim.quorum.bugs import RULES, UNNUMBERED, Bug
from tests.sim.quorum.schedule import QuorumSchedule

SEEDS_MAX = 1_500
BUGS = {**RULES, **UNNUMBERED}
NOT_HERE = {"CE13 archive", "CE15", "CE17"}

# The theme in which a bug shows soonest.
THEMES = {
    "CE1": "rivals",
    "CE2": "rivals",
    "CE3": "rivals",
    "CE4": "rivals",
    "CE5": "disks",
    "CE6": "rivals",
    "CE7": "archive",
    "CE8": "damages",
    "CE9": "disks",
    "CE10": "streams",
    "CE11": "disks",
    "CE12": "streams",
    "CE13 base": "archive",
    "CE14": "rivals",
    "CE16": "archive",
    "only the present members decide during a change": "members",
    "a change ends before the next members are filled": "members",
    "a leader ends another change than its own": "members",
    "a damaged log votes": "damages",
    "a refilled member is sound at once": "damages",
    "a late member gets an old log": "damages",
}

# The first seed to be tried, where the one that notices comes late: it saves time.
HINTS = {"CE2": 401, "CE6": 298, "CE12": 204}


def fails(bug: Bug, seed: int, theme: str) -> bool:
    with planted(bug()):
        try:
            QuorumSchedule(seed, theme).run()
        except Exception:  # noqa: BLE001 - a violation, or whatever the bug led to
            return True
    return False


@pytest.mark.parametrize("rule", THEMES)
def test_a_rule_that_is_taken_out_is_missed(rule: str) -> None:
    """Without it an invariant is broken, for some seed."""
    seeds = [HINTS.get(rule, 0), *range(SEEDS_MAX)]
    assert any(fails(BUGS[rule], seed, THEMES[rule]) for seed in seeds)


def test_every_rule_has_its_theme() -> None:
    """Or its reason not to be here."""
    assert set(THEMES) | NOT_HERE == set(BUGS)
