"""The one place that asks the policy, takes from quotas and notes what was done."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import TYPE_CHECKING

from google.protobuf.message import Message

from shalekv.protocol.access import Permissions
from shalekv.server.access.identity import Credentials, Identity

if TYPE_CHECKING:
    from shalekv.server.service import Call


class Caller:
    """Who calls: an identity, with its permissions by the present policy, and its use of quotas."""

    identity: Identity
    permissions: Permissions
    secret: bytes  # of the present policy; seals what clients get to hand back


class Permit:
    """An operation that was allowed, until it ends."""

    def end(self, outcome: Message | bytes | BaseException | None) -> None:
        """Note the end: gives back what it held of a quota, and writes its audit line."""
        raise NotImplementedError


class Guard:
    """Decides about each operation of a process, and notes it."""

    def caller_of(self, credentials: Credentials) -> Caller | Awaitable[Caller]:
        """Return who calls. Raises as `Authenticator.identify`."""
        raise NotImplementedError

    def begin(self, call: Call, request: Message, size_bytes: int) -> Permit | None:
        """Admit an operation: a unary call, a scan, an operation of a session, or a watch.

        `size_bytes` are those of the request. None: nothing has to be done at its end.

        Raises:
            Unauthenticated: the caller is anonymous and not allowed, or its credentials have
                expired.
            PermissionDenied: its roles do not allow the operation.
            QuotaExceeded: its quota does not.
        """
        raise NotImplementedError
