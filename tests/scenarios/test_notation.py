"""Scenario files cannot pass by saying too little, or what the notation does not know."""

from __future__ import annotations

import pytest

from tests.scenarios.playing import play
from tests.scenarios.reading import parse
from tests.sim.errors import OutOfTime

HOUR_S = 3_600.0
OPENED = "scenario: one\n\nwriter 1 opens\ncount time and slots from here\n"

UNTRUE = {
    "another outcome": "writer 1 puts a=1: Fenced",
    "another slot": """
        writer 1 puts a=1: acknowledged
        time 0, 00000000000000000001.sst, writer_epoch=1 // success
        """,
    "an attempt that was not made": """
        writer 1 puts a=1: acknowledged
        time 0, 00000000000000000000.sst, writer_epoch=1 // success
        time 1, 00000000000000000000.sst, writer_epoch=1 // failure (writer 1 won at time 0)
        """,
    "an attempt too few": """
        writer 1 puts a=1: acknowledged
        writer 1 puts b=2: acknowledged
        time 0, 00000000000000000000.sst, writer_epoch=1 // success
        """,
    "other contents": """
        writer 1 puts a=1: acknowledged
        00000000000000000000.sst, writer_epoch=1: a=2
        """,
    "another manifest": "writer 1 -> Write manifest/00000000000000000001.manifest ❌",
    "other fields": "manifest 1: writer_epoch=2",
    "other keys": "writer 2 opens and sees a=1",
    "another epoch": "writer 2 opens in epoch 3",
    "an order of slots where there is no data": "slot order is sequence order",
    "a put of which nothing is said": "writer 1 puts a=1",
    "a failure of which nothing is said": """
        a stranger of epoch 1 fills wal 0
        writer 1 puts a=1: IllegalState
        """,
    "a gate that nothing reaches": "hold writer 1's create of wal 7",
    "a fault that hits nothing": "lose the reply to writer 1's create of wal 7",
    "slots that are counted from behind data": """
        writer 1 puts a=1: acknowledged
        count time and slots from here
        """,
    "an end that does not come": "writer 1 is fenced",
    "another slot that is polled for": """
        reader 1 opens
        reader 1 polls for wal 1
        """,
    "a request that was sent": """
        hold reader 1's list of wal
        reader 1 begins to open
        1 s pass
        reader 1's list of wal is not sent yet
        release reader 1's list of wal
        """,
    "an object that goes": """
        writer 1 closes
        collector 1 collects
        manifest/00000000000000000000.manifest stays
        """,
    "an object that is not shown": """
        writer 1 puts a=1: acknowledged
        writer 1 puts b=2: acknowledged
        wal/00000000000000000000.sst stays
        """,
    "a collection of which nothing is said": """
        hold collector 1's list of wal
        collector 1 begins to collect
        collector 1's list of wal is held
        """,
    "a snapshot of which nothing is said": "client 1 creates snapshot s for 60 s",
    "a snapshot that is refused": """
        client 1 creates snapshot s for 60 s: done
        client 2 creates snapshot s for 60 s: done
        """,
    "a snapshot that shows something else": """
        client 1 creates snapshot s for 60 s: done
        writer 1 puts a=1: acknowledged
        writer 1 sees a=1 in snapshot s
        """,
    "a snapshot that can be read": """
        client 1 creates snapshot s for 60 s: done
        writer 1 cannot read snapshot s: SnapshotNotFound
        """,
    "other levels": """
        writer 1 puts a=1: acknowledged
        compactor 1 opens
        compactor 1 compacts
        levels/1.sst, level 0: a=2
        """,
    "a compactor that is not superseded": """
        compactor 1 opens
        compactor 1 begins to compact
        compactor 1 fails: Superseded
        """,
}

NO_CONDITIONS = "scenario: one\n\nthe store has no conditional writes, and no database yet\n"

UNTRUE_OF_TWO_PHASES = {
    "another outcome": "process 1 writes wal 0: Exists",
    "an outcome of which nothing is said": "process 1 writes wal 0",
    "another winner": """
        process 1 writes wal 0: Created
        wal/00000000000000000000.sst of process 2
        record of wal/00000000000000000000.sst source of process 1, committed=true
        """,
    "another record": """
        process 1 writes wal 0: Created
        wal/00000000000000000000.sst of process 1
        record of wal/00000000000000000000.sst source of process 1, committed=false
        """,
    "no record": """
        process 1 writes wal 0: Created
        wal/00000000000000000000.sst of process 1
        """,
    "something is there": """
        process 1 writes wal 0: Created
        nothing is there
        """,
    "temporary objects": """
        process 1 writes wal 0: Created
        wal has temporary objects
        """,
    "a record that stays": """
        process 1 writes wal 0: Created
        record of wal/00000000000000000000.sst goes
        """,
    "a fault that hits nothing": """
        process 1 writes wal 0: Created
        lose process 1's commit of wal 7
        """,
}


@pytest.mark.parametrize("steps", UNTRUE.values(), ids=UNTRUE)
def test_untrue_scenarios_fail(steps: str) -> None:
    """A scenario that says something else than what happens, or leaves it out, fails."""
    (scenario,) = parse("untrue.txt", OPENED + steps)
    with pytest.raises((AssertionError, OutOfTime)):
        play(scenario, 0, limit_s=HOUR_S)


@pytest.mark.parametrize("steps", UNTRUE_OF_TWO_PHASES.values(), ids=UNTRUE_OF_TWO_PHASES)
def test_untrue_scenarios_of_two_phases_fail(steps: str) -> None:
    """The same of those that are played without conditional writes."""
    (scenario,) = parse("untrue.txt", NO_CONDITIONS + steps)
    with pytest.raises((AssertionError, OutOfTime)):
        play(scenario, 0, limit_s=HOUR_S)


def test_sentences_of_two_phases_need_such_a_store() -> None:
    """What speaks of records is refused where no records decide."""
    (scenario,) = parse("wrong.txt", OPENED + "process 1 recovers: done")
    with pytest.raises(AssertionError, match="a store with conditions"):
        play(scenario, 0)


def test_a_failure_names_the_line() -> None:
    """The error of a step says in which line of which file it stands."""
    (scenario,) = parse("wrong.txt", OPENED + "writer 1 puts a=1: Fenced")
    with pytest.raises(AssertionError) as raised:
        play(scenario, 0)
    assert raised.value.__notes__ == ["tests/scenarios/wrong.txt:5: writer 1 puts a=1: Fenced"]


def test_unknown_sentences_are_refused() -> None:
    """A line that means nothing is an error, not a comment."""
    (scenario,) = parse("wrong.txt", OPENED + "writer 1 sings")
    with pytest.raises(ValueError, match="0 meanings: writer 1 sings"):
        play(scenario, 0)


@pytest.mark.parametrize("text", ["writer 1 opens", "scenario: one\nscenario: two\n  a"])
def test_steps_and_headings_belong_together(text: str) -> None:
    """A step without a heading and a heading without steps are errors."""
    with pytest.raises(ValueError, match="a scenario has a heading and steps"):
        list(parse("wrong.txt", text))


def test_comments_end_a_line_and_rows_make_a_table() -> None:
    """Comments and blank lines are no steps; rows that follow each other are one."""
    text = "# about\nscenario: one  \n\na b  # why\n  time  0, x   // y\n\n time 1, z\n 'q'\n"
    (scenario,) = parse("right.txt", text)
    assert repr(scenario) == "right: one"
    assert [(step.line, step.text) for step in scenario.steps] == [
        (4, "a b"),
        (5, "time 0, x // y"),
        (8, "'q'"),
    ]
    assert scenario.steps[1].rows == ("time 0, x // y", "time 1, z")
