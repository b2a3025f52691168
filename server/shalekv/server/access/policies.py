"""The access policy as one process knows it: read at the start, looked for again and again.

    unknown ---- `refresh` ----> version n ---- `run`: n + 1 exists ----> version n + 1
                                     |                    |
                                     +-- `replace` -------+-- told to whoever is registered

A change that another process stores is known within `policy_check_ms` and the time of a request;
the first policy, at a process without a way to know callers, within `UNUSED_CHECK_MS`.
While the store does not answer, the last policy is used, for as long as `policy_age_ms_max`. Then
the policy is stale, and whoever asks it must refuse.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import structlog

from shalekv.errors import (
    CorruptObject,
    DatabaseError,
    InvalidRequest,
    InvalidSetting,
    PermissionDenied,
    PolicyUnknown,
    StoreError,
)
from shalekv.protocol.access import (
    ANYBODY,
    AUTHENTICATED,
    ROOT,
    Grant,
    Need,
    Policy,
    Principal,
    Verb,
    check_subject,
    permissions_of,
)
from shalekv.settings import AccessSettings
from shalekv.store.cas import CasStore
from shalekv.store.manifests import StoredManifest
from shalekv.store.policies import StoredPolicy

RETRY_MS_MAX = 10_000  # between two looks while the store does not answer, if that is longer
# Between two looks of a process that can know no caller, while there is no policy: most databases
# have none, and pay for each request. Such a process is restarted before a policy is enforced.
UNUSED_CHECK_MS = 120_000
_ADMIN = Need(Verb.ADMIN)

_log = structlog.get_logger(__name__)


class AccessPolicies:
    """The policy of one database, for all that this process decides."""

    def __init__(
        self, store: CasStore, settings: AccessSettings, *, knows_callers: bool = True
    ) -> None:
        """Know nothing yet: `refresh` comes first. Raises `InvalidSetting`.

        `knows_callers`: this process has a way to find out who calls.
        """
        self._store = store
        self._clock = store.runtime.clock
        self._settings = settings
        self._admins = _admin_grants(settings)
        self._knows_callers = knows_callers
        self._stored: StoredPolicy | None = None
        self._listeners: list[Callable[[], None]] = []
        self._confirmed_ms = -math.inf  # when the last look that was answered began
        self._is_unreadable = False
        self.policy = self._effective(Policy())  # what counts: with the admins of the settings

    @property
    def stored(self) -> Policy:
        """The newest version in the store that this process knows, as it was stored."""
        return Policy() if self._stored is None else self._stored.current

    @property
    def shown(self) -> Policy:
        """The newest version in the store, enforced as it counts here.

        So the first policy that takes the place of none is enforced if `--admins` made none so.
        """
        return replace(self.stored, is_enforced=self.policy.is_enforced)

    @property
    def is_known(self) -> bool:
        """Return whether the policy was read, which may be that there is none."""
        return self._confirmed_ms > -math.inf

    @property
    def is_stale(self) -> bool:
        """Return whether too much time has passed since the policy was known to be the newest.

        One that is not enforced does not age. But a version that exists and cannot be read counts
        as one that is.
        """
        if not self.policy.is_enforced and not self._is_unreadable:
            return False
        age_ms = self._clock.monotonic_ms() - self._confirmed_ms
        return age_ms > self._settings.policy_age_ms_max

    def check(self) -> None:
        """Raise `PolicyUnknown` if the policy is stale."""
        if self.is_stale:
            raise PolicyUnknown(
                "the object store has not answered for too long to know whether the access policy "
                "is still the newest: nothing was applied"
            )

    def listen(self, changed: Callable[[], None]) -> None:
        """Call `changed` after each change of the policy."""
        self._listeners.append(changed)

    async def refresh(self) -> Policy:
        """Read what is newer than the current policy; return the newest.

        Raises `DatabaseNotFound`, `CorruptObject` and `StoreError`.
        """
        began_ms = self._clock.monotonic_ms()
        try:
            stored = await self._open()
            while await stored.read_next():
                self._tell()
        except CorruptObject:
            self._is_unreadable = True
            raise
        self._is_unreadable = False
        self._confirmed_ms = max(self._confirmed_ms, began_ms)
        return self.policy

    async def run(self) -> None:
        """Look for a newer policy at intervals, until cancelled."""
        failures = 0
        while True:
            await self._clock.sleep_ms(self._wait_ms(failures))
            try:
                await self.refresh()
            except (StoreError, CorruptObject, DatabaseError) as error:
                if failures == 0:
                    _log.error("access policy not read", problem=str(error))
                failures += 1
            else:
                if failures:
                    _log.info("access policy read again", version=self.stored.version)
                failures = 0

    async def replace(
        self, policy: Policy, caller: Principal, *, is_forced: bool = False
    ) -> Policy:
        """Store a policy in place of the version that it has; return it with its new version.

        Without `is_forced`, an enforced policy is refused by which the caller loses the verb ADMIN,
        or by which nobody but the admins of the settings has it, unless that is so already. Raises
        `InvalidRequest`, `PolicyChanged`, `PermissionDenied` if the version that would be replaced,
        which the guard may not have known, does not allow it, and the errors of `refresh`. After a
        `StoreError`, or when this is cancelled, it is unknown whether the policy was stored.
        """
        if policy.is_enforced and not is_forced:
            self._check_admins(policy, caller)
        stored = await self._open()
        try:
            return await stored.replace(policy, partial(self._check_right, caller))
        finally:
            self._tell()

    async def _open(self) -> StoredPolicy:
        stored = self._stored
        if stored is None:
            database_id = (await StoredManifest(self._store).refresh()).database_id
            stored = self._stored = StoredPolicy(self._store, database_id)
        return stored

    def _tell(self) -> None:
        """Make the newest stored policy count, if it is new, and tell who is registered."""
        stored = self.stored
        if stored.version <= self.policy.version:
            return
        self.policy = self._effective(stored)
        _log.info(
            "access policy changed", version=stored.version, is_enforced=self.policy.is_enforced
        )
        for changed in self._listeners:
            changed()

    def _effective(self, stored: Policy) -> Policy:
        """Return the policy that counts: without a stored one, admins alone make it enforced."""
        is_enforced = stored.is_enforced or (stored.version == 0 and bool(self._admins))
        grants = (*stored.grants, *self._admins)
        return replace(stored, is_enforced=is_enforced, grants=grants)

    def _check_right(self, caller: Principal, present: Policy) -> None:
        if not permissions_of(self._effective(present), caller).allow(_ADMIN):
            problem = "the access policy was replaced by one that does not allow the caller to"
            raise PermissionDenied(f"{problem} change it", verb=Verb.ADMIN.value)

    def _check_admins(self, policy: Policy, caller: Principal) -> None:
        if not permissions_of(self._effective(policy), caller).allow(_ADMIN):
            raise InvalidRequest(
                "force",
                f"by this policy the caller, {caller.name or 'anonymous'}, would lose the verb "
                "admin. Grant it, or set force",
            )
        is_begun = self.policy.is_enforced and not _has_admin(self.stored)  # by `--admins` alone
        if not is_begun and not _has_admin(policy):
            raise InvalidRequest(
                "force",
                "by this policy nobody but the --admins of a server would have the verb admin: "
                "without them nobody could change it again. Grant it, or set force",
            )

    def _wait_ms(self, failures: int) -> float:
        check_ms = self._settings.policy_check_ms
        if not self._knows_callers and self.policy.version == 0:
            check_ms = max(check_ms, UNUSED_CHECK_MS)
        return min(check_ms * 2.0 ** min(failures, 10), max(check_ms, RETRY_MS_MAX))


def _has_admin(policy: Policy) -> bool:
    """Return whether somebody has the verb ADMIN by a grant."""
    rights = {role.name for role in policy.roles if any(Verb.ADMIN in r.verbs for r in role.rules)}
    rights.add(ROOT)
    return any(not rights.isdisjoint(grant.roles) for grant in policy.grants)


def _admin_grants(settings: AccessSettings) -> tuple[Grant, ...]:
    for name in settings.admin_names:
        try:
            check_subject("admins", name)
        except InvalidRequest as error:
            raise InvalidSetting(f"--admins: {error.problem}") from None
        if name in (ANYBODY, AUTHENTICATED):
            raise InvalidSetting(f"--admins: {name!r} is no principal")
    return tuple(Grant(name, (ROOT,)) for name in sorted(settings.admin_names))
