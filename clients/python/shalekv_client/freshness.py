"""What a client has seen, so that no later read shows it less.

The greatest sequence number is kept of what is certain to stay: not what a read of level
UNCOMMITTED shows, nor that of a write of durability MEMORY. A crash may take those back, and to
wait for a commit that is gone would be to wait for ever.
"""

from __future__ import annotations

from shalekv_client.errors import ErrorDetails, WrongDatabase
from shalekv_client.tokens import SessionToken


class Freshness:
    """The newest state of one database that was seen."""

    def __init__(self) -> None:
        """Nothing was seen."""
        self.seq = 0
        self.database_id = b""
        self.is_bound = False  # to its database: a token was given, or there are several servers

    def seen(self, seq: int) -> None:
        """A reply, or a refusal, has told of a commit that no crash takes back."""
        self.seq = max(self.seq, seq)

    @property
    def token(self) -> SessionToken | None:
        """What to give to another process; None before the first reply."""
        return SessionToken(self.database_id, self.seq) if self.database_id else None

    def advance(self, token: SessionToken, address: str) -> None:
        """See the state of `token`, or a newer one, from now on. Raises `WrongDatabase`."""
        if self.database_id and token.database_id != self.database_id:
            message = f"the token is of database {token.database_id.hex()}, and this client talks "
            message += f"to {self.database_id.hex()}: take a token of this one"
            raise WrongDatabase(ErrorDetails(address, "FAILED_PRECONDITION", message))
        self.database_id, self.is_bound = token.database_id, True
        self.seq = max(self.seq, token.seq)

    def meet(self, database_id: bytes, address: str) -> None:
        """A server has told of another database than the one that is known.

        Raises `WrongDatabase`. A client of one address that was given no token begins anew with
        what stands there now.
        """
        if not database_id:
            return  # a server that does not tell
        if self.database_id and self.is_bound:
            message = f"the server is of database {database_id.hex()}, and this client, or its "
            message += f"token, of {self.database_id.hex()}: correct the address or the token"
            raise WrongDatabase(ErrorDetails(address, "FAILED_PRECONDITION", message))
        if self.database_id:
            self.seq = 0
        self.database_id = database_id
