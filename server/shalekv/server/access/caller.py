"""Callers: identities with what the present policy allows them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from shalekv.errors import ShaleError
from shalekv.protocol.access import (
    EVERYTHING,
    Permissions,
    Policy,
    Quota,
    permissions_of,
    quota_of,
)
from shalekv.server.access.identity import NEVER_MS, Identity
from shalekv.server.access.quotas import PrincipalUse, Quotas


class Policies(Protocol):
    """The policy of the database, as this process knows it."""

    @property
    def policy(self) -> Policy:
        """The newest policy that is known; another object after each change."""
        ...

    @property
    def is_known(self) -> bool:
        """Return whether the policy was read."""
        ...

    @property
    def is_stale(self) -> bool:
        """Return whether there may be a newer policy for too long."""
        ...

    def check(self) -> None:
        """Raise `PolicyUnknown` if the policy is stale."""
        ...

    def listen(self, changed: Callable[[], None]) -> None:
        """Call `changed` after each change."""
        ...


class Caller:
    """The identity of a caller, with its permissions by the present policy."""

    __slots__ = (
        "_permissions",
        "_policies",
        "_policy",
        "_quota",
        "_use",
        "identity",
        "is_fleeting",
        "problem",
    )

    def __init__(
        self,
        identity: Identity,
        policies: Policies,
        problem: ShaleError | None = None,
    ) -> None:
        """`problem` is what is wrong with the credentials, if the identity is not of them."""
        self.identity = identity
        self.problem = problem
        # Whether its credentials still count has to be asked at each call.
        self.is_fleeting = identity.expires_at_ms != NEVER_MS
        self._policies = policies
        self._policy: Policy | None = None  # of which the next two are
        self._permissions = EVERYTHING
        self._quota = Quota()
        self._use: PrincipalUse | None = None

    @property
    def permissions(self) -> Permissions:
        """Return what the present policy allows the caller."""
        if self._policy is not self._policies.policy:
            self._judge()
        return self._permissions

    def use_in(self, quotas: Quotas) -> PrincipalUse:
        """Return what the principal uses, limited by the present policy."""
        if self._policy is not self._policies.policy:
            self._judge()
        use = self._use
        if use is None or use.quota is not self._quota:
            use = self._use = quotas.use_of(self.identity.principal.name, self._quota)
        return use

    @property
    def secret(self) -> bytes:
        """The secret of the present policy; seals what clients get to hand back."""
        return self._policies.policy.secret

    def _judge(self) -> None:
        policy, principal = self._policies.policy, self.identity.principal
        self._permissions = permissions_of(policy, principal)
        self._quota = quota_of(policy, principal)
        self._policy = policy
