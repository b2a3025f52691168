"""The options of `shalekv load --bulk`: combinations that are refused before any work."""

from __future__ import annotations

from pathlib import Path

import click
import pytest

from shalekv.cli.commands.load import load
from shalekv.cli.console.bucket import SHOWN_FLAGS
from shalekv.cli.console.exit_codes import ExitCode
from shalekv.cli.console.variables import CONFIG_VARIABLE, URL_VARIABLE
from shalekv.cli.load import bulk
from shalekv.cli.load.options import STORE_OPTIONS, SWITCHES
from shalekv.errors import LeaseLost
from shalekv.settings import StoreSettings
from tests.unit.cli_client.conftest import Run

BULK = ("--bulk", "--url", "file:///tmp/nowhere-at-all")


@pytest.mark.parametrize("load_id", ["x-15", "users-2026-11"])
async def test_the_id_of_a_batch_of_a_stream_is_refused(
    run: Run, tmp_path: Path, load_id: str
) -> None:
    """An id of a stream's batch is refused: a load could count as committed by a later batch."""
    options = ("--bulk", "--url", f"file://{tmp_path / 'db'}", "--load-id", load_id)
    result = await run(load, *options, stdin=b"k\tv\n")
    assert result.exit_code == ExitCode.USAGE
    assert f"{load_id!r} is the id of a stream's batch" in result.stderr
    assert "Nothing was loaded." in result.stderr


async def test_a_lost_lease_leaves_the_outcome_unknown(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a lost lease the message says that the outcome is unknown, and to repeat the load."""

    class Losing:
        """A load whose lease is lost after its commit was requested."""

        def __init__(self, *given: object) -> None:
            (self.done,) = (each for each in given if hasattr(each, "is_commit_requested"))

        async def run(self, _: str) -> None:
            self.done.is_commit_requested = True
            raise LeaseLost("the lease is gone")

    monkeypatch.setattr(bulk, "_Bulk", Losing)
    result = await run(load, *BULK, "--load-id", "monday", stdin=b"k\tv\n")
    assert "Error: the lease is gone" in result.stderr
    assert "It is not known whether it was committed" in result.stderr
    assert "repeat it with --load-id monday" in result.stderr
    assert "Nothing was loaded." not in result.stderr


def test_the_environment_of_a_server_is_no_option_of_this_run() -> None:
    """Variables for a database and a file are ignored without --bulk."""
    context = load.make_context(
        "load", ["-"], auto_envvar_prefix=None, obj=None, resilient_parsing=True
    )
    assert context.params["url"] is None
    by_name = {option.name: option for option in load.params if isinstance(option, click.Option)}
    assert by_name["url"].envvar == URL_VARIABLE
    assert by_name["config"].envvar == CONFIG_VARIABLE


def test_the_store_is_reached_by_the_flags_of_other_commands() -> None:
    """The flags of a store equal those of other commands, which `load` must not import."""
    assert set(STORE_OPTIONS) == SHOWN_FLAGS
    assert set(STORE_OPTIONS) < set(StoreSettings.model_fields)
    kinds = {name: StoreSettings.model_fields[name].annotation for name in STORE_OPTIONS}
    assert {name for name, kind in kinds.items() if kind is bool} == SWITCHES
