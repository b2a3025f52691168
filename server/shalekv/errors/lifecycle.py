"""Why a process no longer serves."""

from __future__ import annotations

from shalekv.errors.root import ShaleError


class Stopping(ShaleError):
    """This process no longer serves. Nothing was applied: try another address."""

    reason = "STOPPING"


class Fenced(Stopping):
    """Another writer has taken over. Nothing was applied by this one: find the new writer."""

    reason = "FENCED"

    def __init__(self, message: str, *, own_epoch: int, newer_epoch: int) -> None:
        """`newer_epoch` is the epoch that was met."""
        super().__init__(message)
        self.own_epoch = own_epoch
        self.newer_epoch = newer_epoch


class Superseded(Stopping):
    """Another compactor has taken over. Nothing was published by this one."""

    reason = "SUPERSEDED"

    def __init__(self, message: str, *, own_epoch: int, newer_epoch: int) -> None:
        """`newer_epoch` is the compactor epoch that was met."""
        super().__init__(message)
        self.own_epoch = own_epoch
        self.newer_epoch = newer_epoch


class StandingBy(Stopping):
    """This process waits to be elected as the writer. Nothing was applied: try another address."""

    reason = "STANDING_BY"

    def __init__(self, message: str, *, writer_address: str) -> None:
        """`writer_address` is that of whoever is elected; empty if nobody is known to be."""
        super().__init__(message)
        self.writer_address = writer_address
