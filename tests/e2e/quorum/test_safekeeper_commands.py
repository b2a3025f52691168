"""The commands about safekeepers when a user makes mistakes."""

from __future__ import annotations

import json
from pathlib import Path

from tests.kit.processes.cluster import Cluster
from tests.kit.processes.processes import Processes

USAGE, NO_DATABASE, NO_QUORUM = 2, 3, 13
NOBODY = "127.0.0.1:1"


async def test_what_is_refused_is_explained(processes: Processes, tmp_path: Path) -> None:
    """Each message names what is wrong, and nothing is changed."""
    cluster = await Cluster.started(processes, tmp_path)
    await cluster.run("safekeeper", "status", code=NO_DATABASE)

    plain = await processes.serve(cluster.url)
    assert await plain.stop() == 0, plain.report()
    for argv in (("status",), ("add", NOBODY), ("cancel",), ("recover",)):
        refused = await cluster.run("safekeeper", *argv, code=USAGE)
        assert "no safekeepers: see `shalekv safekeeper switch --help`" in refused.stderr()
    again = await cluster.run("safekeeper", "switch", "--to", "object-store", code=USAGE)
    assert "in mode object-store already" in again.stderr()
    nobody = ",".join([*cluster.addresses[:2], NOBODY])
    missing = await cluster.run(
        "safekeeper", "switch", "--to", "quorum", "--safekeepers", nobody, code=NO_QUORUM
    )
    two = ",".join(cluster.addresses[:2])
    even = await cluster.run(
        "safekeeper", "switch", "--to", "quorum", "--safekeepers", two, code=USAGE
    )
    assert "2 of them: an odd number is needed" in even.stderr()
    assert f"the safekeeper at {NOBODY} does not answer" in missing.stderr()

    three = cluster.safekeepers
    switched = await cluster.run(
        "safekeeper", "switch", "--to", "quorum", *three, "--format", "json"
    )
    assert json.loads(switched.stdout())["wal_mode"] == "quorum"
    first, *_ = cluster.addresses
    refusals: list[tuple[tuple[str, ...], int, str]] = [
        (("remove", NOBODY), USAGE, f"{NOBODY} is not a member: the members are {first}"),
        (("add", first), USAGE, "is a member already: if it was made anew, use `replace`"),
        (("add", NOBODY), NO_QUORUM, "does not answer"),
        (("add", "nonsense"), USAGE, "'nonsense' is not HOST:PORT"),
        (("replace", first, first), USAGE, "there is nothing to replace"),
        (("cancel",), USAGE, "no change is under way"),
    ]
    for command, code, words in refusals:
        refused = await cluster.run("safekeeper", *command, code=code)
        assert words in refused.stderr(), refused.report()
        assert "Traceback" not in refused.stderr()
    begun = await cluster.run("safekeeper", "remove", first, "--wait-s", "0", "--format", "json")
    assert json.loads(begun.stdout()) == {
        "members": list(cluster.addresses),
        "next_members": list(cluster.addresses[1:]),
    }
    assert "An even number of members survives no more losses than one" in begun.stderr()
    status = await cluster.run("safekeeper", "status", "--format", "json")
    rows = [json.loads(line) for line in status.stdout().splitlines()]
    assert [row["place"] for row in rows] == ["leaving", "member", "member"]
