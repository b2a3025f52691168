"""Fixtures: a server over a dict, and commands that run against it over a real socket."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TypeAlias

import click
import pytest
import pytest_asyncio
from click.testing import CliRunner, Result

from tests.kit.serving.dict_server import DictServer

Run: TypeAlias = Callable[..., Awaitable[Result]]


@pytest_asyncio.fixture
async def server() -> AsyncIterator[DictServer]:
    """A server without data."""
    async with DictServer() as running:
        yield running


@pytest.fixture
def run(server: DictServer) -> Run:
    """Run a command in a thread with its own loop; SHALEKV_ADDR is the server."""

    async def invoke(command: click.Command, *args: str, stdin: bytes | None = None) -> Result:
        runner = CliRunner(env={"SHALEKV_ADDR": server.address})
        # Same as in `shalekv`: a command keeps the names with which it is called first.
        names = ["-h", "--help"]
        return await asyncio.to_thread(
            runner.invoke, command, args, input=stdin, help_option_names=names
        )

    return invoke
