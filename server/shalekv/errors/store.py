"""What an object store failed at."""

from __future__ import annotations

from shalekv.errors.root import ShaleError


class StoreError(ShaleError):
    """The object store failed."""

    reason = "STORE"

    def __init__(self, store: str, operation: str, name: str, problem: str) -> None:
        """`store` is its URL without credentials, `operation` such as ``create``."""
        super().__init__(f"{store}: {operation} {name}: {problem}")
        self.store = store
        self.operation = operation
        self.name = name
        self.problem = problem


class ObjectNotFound(StoreError):
    """No object has this name."""

    reason = "OBJECT_NOT_FOUND"


class StoreUnavailable(StoreError):
    """No answer, or a refusal that may pass. Try again."""

    reason = "STORE_UNAVAILABLE"


class StoreRefused(StoreError):
    """No permission, wrong credentials, no such bucket, a clock that is wrong: mend that first."""

    reason = "STORE_REFUSED"

    def __init__(
        self, store: str, operation: str, name: str, problem: str, *, may_pass: bool = False
    ) -> None:
        """`may_pass`: a store that has accepted requests before may accept this one later."""
        super().__init__(store, operation, name, problem)
        self.may_pass = may_pass


class StoreUnfit(StoreError):
    """The store does not keep what the protocol rests on. Use another one, or two-phase CAS."""

    reason = "STORE_UNFIT"


class StoreBroken(StoreError):
    """A sync failed: the state of the disk is unknown and this process must not write to it."""

    reason = "STORE_BROKEN"
