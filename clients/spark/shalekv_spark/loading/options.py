"""The options of a load, checked before anything is asked of Spark or of a store."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, TypedDict

import structlog

from shalekv.errors import (
    Fenced,
    IllegalState,
    InvalidRequest,
    InvalidSetting,
    LeaseLost,
    LoadUnknown,
    OutcomeUnknown,
)
from shalekv.format.coding import Piece
from shalekv.format.sst_message import info_message, info_of
from shalekv.jobs.bulk_load import LEASE_TTL_S, commit_by_opening, shown_key
from shalekv.protocol.sst_table import SstInfo
from shalekv.settings import LevelSettings, LimitSettings
from shalekv.store.cas import CasStore
from shalekv.store.manifests import StoredManifest
from shalekv.v1 import manifest_pb2
from shalekv_client import (
    Client,
    DeadlinePassed,
    NoWriter,
    Overloaded,
    ShaleKVError,
    Stopping,
    WrongDatabase,
)
from shalekv_client import InvalidRequest as Refused
from shalekv_client import LeaseLost as LeaseIsLost
from shalekv_client import LoadUnknown as LoadIsUnknown
from shalekv_client import OutcomeUnknown as Unanswered
from shalekv_client.servers import checked_addresses
from shalekv_spark.arguments import settings_of
from shalekv_spark.loading.rows import DuplicateRule, LoadSchema
from shalekv_spark.place import Place

if TYPE_CHECKING:
    from pyspark.sql.types import StructType


# --- commit
# What the tasks of a load have reported, as one list of files; and its commit, by whom it may be.
#
# A load is committed by the writer of the database. One that lives is asked to; where there is
# none, this process is the writer for a moment, which fences any other. So that never happens by
# mistake: only where nobody has said where a writer is, or where the caller wants it.


OPEN = "open"  # in the place of an address: be the writer for a moment
_PROBE_MS = 5_000
_ATTEMPT_MS = 15_000
_PER_FILE_MS = 20  # the writer looks at each
_PAUSE_S = 0.5
_PAUSES_MAX = 16.0  # of `_PAUSE_S`, at once
_REPEATED = (Unanswered, NoWriter, Stopping, Overloaded, DeadlinePassed, Fenced)

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Written:
    """The files of a load, by key, and what is in them."""

    infos: Sequence[SstInfo]
    rows: int
    deletes: int

    @property
    def size_bytes(self) -> int:
        """Of all files."""
        return sum(info.size_bytes for info in self.infos)


def gathered(reports: Iterable[Mapping[str, Any]]) -> Written:
    """The files of these reports of all tasks.

    Raises `InvalidRequest` if a task has refused its rows, or keys of two partitions overlap, and
    `IllegalState` if two attempts of one task are reported, or not all that it has written.
    """
    reports = [*reports]
    attempts: dict[int, int] = {}
    counted: dict[int, int] = {}
    infos: list[tuple[SstInfo, int]] = []
    problems = sorted((each["partition"], each["problem"]) for each in reports if each["problem"])
    if problems:
        raise InvalidRequest("rows", problems[0][1])
    for report in reports:
        partition, attempt = report["partition"], report["attempt"]
        if attempts.setdefault(partition, attempt) != attempt:
            raise IllegalState(f"partition {partition} is reported by two attempts: retry the load")
        sign = 1 if report["file"] is not None else -1
        counted[partition] = counted.get(partition, 0) + sign * report["rows"]
        if report["file"] is not None:
            message = manifest_pb2.SstInfo.FromString(bytes(report["file"]))
            infos.append((info_of(message, Piece("the report of a task", 0, b"")), partition))
    totals = [each for each in reports if each["file"] is None]
    if any(counted.values()) or len(totals) != len(attempts):
        raise IllegalState("the tasks of the load do not report all that they wrote")
    infos.sort(key=lambda each: each[0].first_key)
    for (before, one), (after, other) in pairwise(infos):
        if after.first_key <= before.last_key:
            problem = f"partitions {one} and {other} are not sorted: both hold keys between "
            problem += f"{shown_key(after.first_key)} and {shown_key(before.last_key)}"
            raise InvalidRequest("rows", problem)
    return Written(
        [info for info, _ in infos],
        sum(each["rows"] for each in totals),
        sum(each["deletes"] for each in totals),
    )


@dataclass(frozen=True, slots=True)
class Committed:
    """A load that is committed: its sequence number, and whether it was before."""

    seq: int
    already_applied: bool


class Committer:
    """Commits one load of one database."""

    def __init__(
        self, store: CasStore, writer: str | Sequence[str] | None, *, timeout_s: float
    ) -> None:
        """`writer` is an address or several, `OPEN`, or None: what the manifest says.

        A commit without an answer, or that the writer has no room for, is repeated for `timeout_s`;
        and when two that open the database have fenced each other, without `OPEN`.
        """
        self._store = store
        self._writer = writer
        self._timeout_s = timeout_s
        self._fenced = 0  # attempts that another writer has ended, one after the other
        self.has_begun = False  # from then on the load may be committed

    async def check(self) -> None:
        """Find the writer, before there is anything to commit.

        Raises `InvalidSetting`, which says what to pass, if none answers, or one of another
        database.
        """
        manifest = await StoredManifest(self._store).refresh()
        addresses = self._addresses(manifest.writer_address)
        if addresses is None:
            return
        try:
            async with Client(addresses, timeout_ms=_PROBE_MS) as client:
                found = (await client.status()).view.database_id
        except (ShaleKVError, ValueError) as error:
            raise _unreachable(addresses, error) from error
        if found != manifest.database_id:
            problem = f"writer: {_shown(addresses)} serves database {found.hex()}, and the load is"
            raise InvalidSetting(f"{problem} for {manifest.database_id.hex()}")

    async def commit(self, load_id: str, infos: Sequence[SstInfo]) -> Committed:
        """Commit the files as this load, unless it was committed before.

        Raises `OutcomeUnknown` if nobody has answered: repeat the load with the same `load_id`.
        Else it is not committed: `LeaseLost`, `LoadUnknown`, `InvalidRequest`, what
        `commit_by_opening` raises.
        """
        self.has_begun = True
        deadline_s = asyncio.get_running_loop().time() + self._timeout_s
        while True:
            stored = StoredManifest(self._store)
            addresses = self._addresses((await stored.refresh()).writer_address)
            left_s = deadline_s - asyncio.get_running_loop().time()
            try:
                if addresses is None:
                    loaded = await commit_by_opening(self._store, load_id, infos)
                    return Committed(loaded.seq, loaded.already_applied)
                return await self._ask(addresses, load_id, infos, left_s)
            except _REPEATED as error:
                if isinstance(error, Fenced) and self._writer == OPEN:
                    raise  # two that open on demand would go on fencing each other
                if left_s <= _PAUSE_S:
                    message = f"load {load_id!r}: {error}. Nobody has said what became of it: run "
                    message += "the load again with the same load_id; if it stands, nothing happens"
                    raise OutcomeUnknown(message) from error
                log.warning("a commit is repeated", load_id=load_id, error=str(error))
                await self._pause(is_fenced=isinstance(error, Fenced))

    async def _ask(
        self, addresses: Sequence[str], load_id: str, infos: Sequence[SstInfo], left_s: float
    ) -> Committed:
        attempt_ms = _ATTEMPT_MS + _PER_FILE_MS * len(infos)
        timeout_ms = max(int(min(left_s * 1_000, attempt_ms)), 1)
        try:
            async with Client(addresses) as client:
                messages = map(info_message, infos)
                loaded = await client.ingest(load_id, messages, timeout_ms=timeout_ms)
        except LeaseIsLost as error:
            raise LeaseLost(str(error)) from error
        except LoadIsUnknown as error:
            raise LoadUnknown(str(error)) from error
        except Refused as error:
            raise InvalidRequest(error.field, str(error)) from error
        except WrongDatabase as error:
            raise InvalidSetting(f"writer: {error}") from error
        return Committed(loaded.seq, loaded.already_applied)

    async def _pause(self, *, is_fenced: bool) -> None:
        """Wait a little; those that have fenced each other not equally long, and ever longer."""
        self._fenced = self._fenced + 1 if is_fenced else 0
        longest = min(2.0**self._fenced, _PAUSES_MAX)
        share = self._store.runtime.random.uniform(1, longest)
        await self._store.runtime.clock.sleep_ms(_PAUSE_S * 1_000 * share)

    def _addresses(self, named: str) -> Sequence[str] | None:
        """Who is asked; None: nobody is. `named` is what the manifest says."""
        if self._writer == OPEN or (self._writer is None and not named):
            return None
        if self._writer is None:
            return [named]
        given = self._writer.split(",") if isinstance(self._writer, str) else [*self._writer]
        return [address.strip() for address in given]


def _shown(addresses: Sequence[str]) -> str:
    return ", ".join(addresses)


def _unreachable(addresses: Sequence[str], error: Exception) -> InvalidSetting:
    message = (
        f"writer: nobody answers at {_shown(addresses)} ({error}). If the database is served "
        f"elsewhere, pass writer='HOST:PORT'; if nobody serves it, pass writer='{OPEN}': the load "
        "is then committed by opening the database, which ends a writer that still lives"
    )
    return InvalidSetting(message)


# --- options


COMMIT_TIMEOUT_S = 120.0
LEASE_TTL_S_MIN = 10


class LoadOptions(TypedDict, total=False):
    """What a load can be told; each has a default.

    - `on_duplicate`: ``error`` refuses two rows with one key; ``greatest:<column>`` and
      ``least:<column>`` load the one with the greatest or least value there, and refuse two
      different rows that this does not tell apart. Nulls lose.
    - `writer`: HOST:PORT of the writer, or several; ``open``: open the database as its writer for
      the commit, which ends another one; None: ask the one that the manifest names, and open if it
      names none.
    - `presorted`: every partition is sorted by key already, and no two overlap.
    - `partitions`: how many there are after sorting; None: as Spark finds good.
    - `key`, `value`, `op`, `expire_at`: names of columns. The latter two may be missing; the empty
      name says that they are.
    - `store`: settings of the store, as in server/docs/settings.md.
    - `levels`: settings of the files, of the same page.
    - `value_bytes_max`: no value may be larger; as the limit of the servers.
    - `lease_ttl_s`: how long files stay when the driver has died.
    - `commit_timeout_s`: how long a commit without an answer is repeated.
    """

    on_duplicate: str
    writer: str | Sequence[str] | None
    presorted: bool
    partitions: int | None
    key: str
    value: str
    op: str | None
    expire_at: str | None
    store: Mapping[str, object] | None
    levels: Mapping[str, object] | None
    value_bytes_max: int | None
    lease_ttl_s: int
    commit_timeout_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadPlan:
    """Where and how rows are loaded."""

    place: Place
    levels: LevelSettings
    limits: LimitSettings
    on_duplicate: str = "error"
    writer: str | Sequence[str] | None = None
    presorted: bool = False
    partitions: int | None = None
    key: str = "key"
    value: str = "value"
    op: str | None = None
    expire_at: str | None = None
    lease_ttl_s: int = LEASE_TTL_S
    commit_timeout_s: float = COMMIT_TIMEOUT_S

    @classmethod
    def of(cls, url: str, options: LoadOptions) -> LoadPlan:
        """The plan with these options.

        Raises `InvalidUrl`, and `InvalidSetting` for an option that is unknown or out of its
        limits, and `InvalidRequest` for a rule for duplicates that is none.
        """
        given: dict[str, Any] = dict(options)
        unknown = given.keys() - LoadOptions.__annotations__.keys()
        if unknown:
            known = ", ".join(sorted(LoadOptions.__annotations__))
            raise InvalidSetting(f"unknown option {', '.join(sorted(unknown))}; known are {known}")
        place = Place.of(url, given.pop("store", None))
        value_bytes_max = given.pop("value_bytes_max", None)
        levels = settings_of(LevelSettings, given.pop("levels", None))
        bounds = {} if value_bytes_max is None else {"value_bytes_max": value_bytes_max}
        limits = settings_of(LimitSettings, bounds)
        plan = cls(place=place, levels=levels, limits=limits, **given)
        plan._check()
        return plan

    def schema_of(self, schema: StructType) -> LoadSchema:
        """The columns of a frame with this schema. Raises `InvalidRequest`."""
        return LoadSchema.of(
            schema,
            key=self.key,
            value=self.value,
            op=self.op,
            expire_at=self.expire_at,
            on_duplicate=self.on_duplicate,
        )

    def _check(self) -> None:
        rule = DuplicateRule.parse(self.on_duplicate)
        if self.presorted and (rule is not None or self.partitions is not None):
            message = "presorted: the rows stay as they are: leave out on_duplicate and partitions"
            raise InvalidSetting(message)
        if self.partitions is not None and self.partitions < 1:
            raise InvalidSetting(f"partitions: expected 1 or more, found {self.partitions}")
        if self.lease_ttl_s < LEASE_TTL_S_MIN:
            problem = f"expected {LEASE_TTL_S_MIN} or more, found {self.lease_ttl_s}"
            raise InvalidSetting(f"lease_ttl_s: {problem}")
        if self.commit_timeout_s <= 0:
            raise InvalidSetting(f"commit_timeout_s: expected > 0, found {self.commit_timeout_s}")
        if self.writer is None or self.writer == OPEN:
            return
        try:
            checked_addresses(self.writer)
        except ValueError as error:
            raise InvalidSetting(f"writer: {error}; or {OPEN!r}") from None
