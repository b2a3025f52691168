"""The contract of object stores as one class: a store that passes it is fit to be used."""

from __future__ import annotations

from tests.contract.creating import CreateContract
from tests.contract.listing import ListContract
from tests.contract.reading import ReadContract


class StoreContract(CreateContract, ReadContract, ListContract):
    """All of the contract. A store is tested by a subclass with an `open_store` fixture."""
