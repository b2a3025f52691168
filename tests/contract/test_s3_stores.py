"""The S3 store keeps the contract of object stores on a real server, and on a simulated one.

moto is run with one request at a time: it has no locks, so what it shows of races is that the
store tells their outcomes apart. That a condition holds under races is shown on versitygw.
"""

from __future__ import annotations

import pytest

from tests.contract.store_contract import HttpStoreContract, ListContract, RaceContract


class TestOnVersitygw(HttpStoreContract):
    @pytest.fixture
    def kind(self) -> str:
        """S3."""
        return "s3"


class TestOnMoto(RaceContract, ListContract):
    rounds = 2
    many = 60  # pages are tested on versitygw
    passing_objects = 3

    @pytest.fixture
    def kind(self) -> str:
        """As above."""
        return "moto"
