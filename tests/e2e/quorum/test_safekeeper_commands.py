"""The commands about safekeepers as a user meets them who has made a mistake."""

from __future__ import annotations

import json
from pathlib import Path

from tests.kit.processes.processes import Processes
from tests.kit.processes.quorum_cluster import Cluster

USAGE, NO_DATABASE, NO_QUORUM = 2, 3, 13
NOBODY = "127.0.0.1:1"


async def test_what_is_refused_is_explained(processes: Processes, tmp_path: Path) -> None:
    """Each message names what is wrong, and nothing is changed."""
    cluster = Cluster(processes, tmp_path, count=3)
    await cluster.start()
    nothing = await cluster.run("safekeeper", "status")
    assert await nothing.exited() == NO_DATABASE, nothing.report()

    plain = await processes.serve(cluster.url)
    assert await plain.stop() == 0, plain.report()
    for argv in (("status",), ("add", NOBODY), ("cancel",), ("recover",)):
        refused = await cluster.run("safekeeper", *argv)
        assert await refused.exited() == USAGE, refused.report()
        assert "no safekeepers: see `shalekv safekeeper switch --help`" in refused.stderr()
    again = await cluster.run("safekeeper", "switch", "--to", "object-store")
    assert await again.exited() == USAGE
    assert "in mode object-store already" in again.stderr()
    nobody = ",".join([*cluster.addresses[:2], NOBODY])
    missing = await cluster.run("safekeeper", "switch", "--to", "quorum", "--safekeepers", nobody)
    assert await missing.exited() == NO_QUORUM, missing.report()
    two = ",".join(cluster.addresses[:2])
    even = await cluster.run("safekeeper", "switch", "--to", "quorum", "--safekeepers", two)
    assert await even.exited() == USAGE, even.report()
    assert "2 of them: an odd number is needed" in even.stderr()
    assert f"the safekeeper at {NOBODY} does not answer" in missing.stderr()

    three = cluster.writer_flags()[2:]
    switched = await cluster.run("safekeeper", "switch", "--to", "quorum", *three)
    assert await switched.exited() == 0, switched.report()
    first, *_ = cluster.addresses
    refusals: list[tuple[tuple[str, ...], int, str]] = [
        (("remove", NOBODY), USAGE, f"{NOBODY} is none of them: they are {first}"),
        (("add", first), USAGE, "is one already: if it was made anew, use `replace`"),
        (("add", NOBODY), NO_QUORUM, "does not answer"),
        (("add", "nonsense"), USAGE, "'nonsense' is not HOST:PORT"),
        (("replace", first, first), USAGE, "there is nothing to replace"),
        (("cancel",), USAGE, "no change is under way"),
    ]
    for command, code, words in refusals:
        refused = await cluster.run("safekeeper", *command)
        assert await refused.exited() == code, refused.report()
        assert words in refused.stderr(), refused.report()
        assert "Traceback" not in refused.stderr()
    begun = await cluster.run("safekeeper", "remove", first, "--wait-s", "0")
    assert "An even number of members survives no more losses than one less" in begun.stderr()
    status = await cluster.run("safekeeper", "status", "--format", "json")
    rows = [json.loads(line) for line in status.stdout().splitlines()]
    assert [row["place"] for row in rows] == ["leaving", "member", "member"]
