"""What the system asks of an elector, and what electors are made of.

An elector may be wrong: it may elect two at once, or nobody for a while. Epochs and fences keep
the history right whatever it says (protocol, "Epochs and fences"). Another kind of elector is one
more implementation of `Elector` and `RenewableLease`, and one more case in `place` and `opening`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

# Told the HOST:PORT of who holds the lease, whenever that changes; "" for nobody.
Told = Callable[[str], None]


class RenewableLease(Protocol):
    """A lease that this process holds; what keeps it is a `Tenure`."""

    async def renew(self) -> str | None:
        """Renew it, however often that has to be tried; why not, when that can't be any more."""
        ...

    async def release(self) -> None:
        """Let others have it at once, if that can be done; nothing is raised if not."""
        ...


class Term(Protocol):
    """The time in which this process may try to be the writer."""

    async def keep(self) -> str:
        """Renew until the lease is lost; returns why. May be cancelled, and then begins again."""
        ...

    async def resign(self) -> None:
        """Let others have the lease at once. REQUIRES: `keep` does not run."""
        ...


class Elector(Protocol):
    """Decides who tries to be the writer of one database."""

    async def campaign(self) -> Term:
        """Wait until this process may try; may be cancelled.

        Trouble is logged and waited out. What trying again cannot mend is raised: `StoreRefused`,
        `StoreBroken`, `InvalidSetting`.
        """
        ...
