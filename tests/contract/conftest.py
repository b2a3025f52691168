"""Lets the asserts of the contract, which stand in modules of their own, say what they compared.

And the record stores, which more than one of these modules needs.
"""

from __future__ import annotations

import pytest

for module in (
    "bucket_contract",
    "creating",
    "listing",
    "reading",
    "record_contract",
    "two_phase_contract",
):
    pytest.register_assert_rewrite(f"tests.contract.{module}")

from tests.contract.record_servers import (  # noqa: E402  (after what rewrites their asserts)
    dynamo_records,
    maria_records,
    moto_records,
    postgres_records,
    sqlite_records,
)

__all__ = [
    "dynamo_records",
    "maria_records",
    "moto_records",
    "postgres_records",
    "sqlite_records",
]
