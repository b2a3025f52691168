"""The servers that tests of several folders share, and what holds for all tests."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest
from hypothesis import settings

from tests.kit.processes.processes import Processes
from tests.kit.seeds import VARIABLE, run_seed
from tests.servers.fixtures import (
    azure_server,
    dynamo_server,
    etcd_server,
    google_server,
    kubernetes,
    maria_server,
    minio_server,
    moto_server,
    postgres_server,
    s3_server,
)

__all__ = [
    "azure_server",
    "dynamo_server",
    "etcd_server",
    "google_server",
    "kubernetes",
    "maria_server",
    "minio_server",
    "moto_server",
    "postgres_server",
    "s3_server",
]

# The asserts of this contract, which tests of several folders import, say what they compared.
pytest.register_assert_rewrite("tests.contract.store_contract")

# readline puts the size of the terminal into the environment of whatever is started next, such as
# the workers of pytest-xdist; but what tests start writes into files, which have no such size.
for _name in ("COLUMNS", "LINES"):
    os.environ.pop(_name, None)

# A shell ignores Ctrl-C for what it starts in the background, and so would all that tests start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# A property takes as long as it takes: a busy machine is no counterexample.
settings.register_profile("no deadline", deadline=None)
settings.load_profile("no deadline")


@pytest.fixture
def processes() -> Iterator[Processes]:
    """Starts processes for a test and ends them with it."""
    with Processes() as started:
        yield started


def pytest_report_header() -> str:
    """The seed from which random tests of this run draw, and how to run them again with it."""
    return f"seed of this run: {run_seed()} (again: {VARIABLE}={run_seed()} make test)"
