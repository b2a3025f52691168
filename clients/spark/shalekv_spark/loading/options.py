"""The options of a load, and its commit.

Options are checked before any request to Spark or to the store.

The writer of the database commits a load. If one serves the database, it is asked to. If none does,
this process becomes the writer for the commit, which fences any other writer. To prevent that by
mistake, it is done only if neither the manifest nor the caller names a writer, or if the caller
asks for it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, TypedDict

import structlog

from shalekv.errors import (
    DeadlinePassed,
    Fenced,
    IllegalState,
    InvalidRequest,
    InvalidSetting,
    LeaseLost,
    LoadUnknown,
    OutcomeUnknown,
    ShaleError,
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
    AccessUnknown,
    Client,
    NoWriter,
    Overloaded,
    PermissionDenied,
    ShaleKVError,
    Stopping,
    TlsOptions,
    Unauthenticated,
    WrongDatabase,
)
from shalekv_client import DeadlinePassed as TooLate
from shalekv_client import InvalidRequest as Refused
from shalekv_client import LeaseLost as LeaseIsLost
from shalekv_client import LoadUnknown as LoadIsUnknown
from shalekv_client import OutcomeUnknown as Unanswered
from shalekv_client.client import TIMEOUT_MS
from shalekv_client.routing.addresses import checked_addresses
from shalekv_spark.arguments import settings_of
from shalekv_spark.loading.rows import DuplicateRule, LoadSchema
from shalekv_spark.place import Place

if TYPE_CHECKING:
    from pyspark.sql.types import StructType


OPEN = "open"  # instead of an address: open the database as its writer for the commit
_PROBE_MS = 5_000
_ATTEMPT_MS = 15_000
_PER_FILE_MS = 20  # the writer checks each file
_PAUSE_S = 0.5
_PAUSES_MAX = 16.0  # the longest pause, in `_PAUSE_S`
_REFUSED_PAUSE_S = 3.0  # at least, after a refused token: servers count wrong ones
_REPEATED = (
    *(Unanswered, NoWriter, Stopping, Overloaded, TooLate, Fenced),
    AccessUnknown,
)
# They settle the attempts before: the id of the load was looked for.
_SETTLING = (LeaseLost, LoadUnknown, InvalidRequest)

log = structlog.get_logger()

COMMIT_TIMEOUT_S = 120.0
LEASE_TTL_S_MIN = 10


class _NotAsked(InvalidSetting):
    """The writer was not asked for the load, or has refused before it looked for its id."""


@dataclass(frozen=True, slots=True)
class Written:
    """The files of a load, by key, and the counts of their rows."""

    infos: Sequence[SstInfo]
    rows: int
    deletes: int

    @property
    def size_bytes(self) -> int:
        """The size of all files."""
        return sum(info.size_bytes for info in self.infos)


def collect_reports(reports: Iterable[Mapping[str, Any]]) -> Written:
    """Collect the files in the reports of all tasks.

    Raises `InvalidRequest` if a task has refused its rows, or if keys of two partitions overlap.
    Raises `IllegalState` if two attempts of one task are reported, or if a report is incomplete.
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
    """A committed load: its sequence number, and whether it had been committed before."""

    seq: int
    already_applied: bool


class Committer:
    """Commits one load of one database."""

    def __init__(
        self,
        store: CasStore,
        writer: str | Sequence[str] | None,
        *,
        timeout_s: float,
        tls: TlsOptions | None = None,
        token_file: str | None = None,
    ) -> None:
        """Create a committer. `writer`: one address or several, `OPEN`, or None: see the manifest.

        The writer is called with `tls`, if that is given, and with the access token in the file. A
        commit is repeated for `timeout_s` when it is not answered, when the writer is overloaded or
        cannot find out who calls, and, unless `writer` is `OPEN`, when two processes that open the
        database have fenced each other. Once an attempt was not answered, it is repeated as well
        when the writer refuses the caller: the file may have another token by then.
        """
        self._store = store
        self._writer = writer
        self._timeout_s = timeout_s
        self._tls = tls or False
        self._token_file = token_file
        self._fenced = 0  # attempts in a row that another writer has fenced
        self.has_begun = False  # once it is True, the load may be committed

    async def check(self) -> None:
        """Check that the writer answers, before there is anything to commit.

        Raises `InvalidSetting`, which says what to pass, if no writer answers, or one of another
        database.
        """
        manifest = await StoredManifest(self._store).refresh()
        addresses = self._addresses(manifest.writer_address)
        if addresses is None:
            return
        try:
            async with self._client(addresses, timeout_ms=_PROBE_MS) as client:
                found = (await client.status()).view.database_id
        except (Unauthenticated, PermissionDenied) as error:
            raise InvalidSetting(f"writer: {error}") from error
        except (ShaleKVError, ValueError) as error:
            raise _unreachable(addresses, error) from error
        except OSError as error:  # its text names the file
            raise InvalidSetting(f"token_file: {error}") from error
        if found != manifest.database_id:
            problem = f"writer: {_shown(addresses)} serves database {found.hex()}, and the load is"
            raise InvalidSetting(f"{problem} for {manifest.database_id.hex()}")

    async def commit(self, load_id: str, infos: Sequence[SstInfo]) -> Committed:
        """Commit the files as this load, unless it was committed before.

        Raises `OutcomeUnknown` if no writer has answered, or an attempt was not answered and no
        later one has settled it: repeat the load with the same `load_id`. Raises, with nothing
        committed, `DeadlinePassed` if no writer has accepted the load in time, `InvalidSetting` if
        the writer refuses the caller, `LeaseLost`, `LoadUnknown`, `InvalidRequest`, and the errors
        of `StoredManifest.refresh`. Raises as well what `commit_by_opening` does.
        """
        is_unknown = False  # whether an attempt has committed the load
        self.has_begun = True
        deadline_s = asyncio.get_running_loop().time() + self._timeout_s
        while True:
            try:
                return await self._attempt(load_id, infos, deadline_s)
            except _SETTLING:
                raise
            except (ShaleError, ShaleKVError) as error:
                if isinstance(error, Fenced) and self._writer == OPEN:
                    raise  # two processes with `OPEN` would fence each other again and again
                if not is_unknown and not isinstance(error, _REPEATED):
                    raise
                is_unknown = is_unknown or isinstance(error, (Unanswered, Fenced))
                pause_s = self._pause_s(error)
                if deadline_s - asyncio.get_running_loop().time() <= pause_s:
                    raise _given_up(load_id, error, is_unknown=is_unknown) from error
                log.warning("a commit is repeated", load_id=load_id, error=str(error))
                await self._store.runtime.clock.sleep_ms(pause_s * 1_000)

    async def _attempt(
        self, load_id: str, infos: Sequence[SstInfo], deadline_s: float
    ) -> Committed:
        manifest = await StoredManifest(self._store).refresh()
        addresses = self._addresses(manifest.writer_address)
        if addresses is not None:
            left_s = deadline_s - asyncio.get_running_loop().time()
            return await self._ask(addresses, load_id, infos, left_s)
        loaded = await commit_by_opening(self._store, load_id, infos)
        return Committed(loaded.seq, loaded.already_applied)

    async def _ask(
        self, addresses: Sequence[str], load_id: str, infos: Sequence[SstInfo], left_s: float
    ) -> Committed:
        attempt_ms = _ATTEMPT_MS + _PER_FILE_MS * len(infos)
        timeout_ms = max(int(min(left_s * 1_000, attempt_ms)), 1)
        try:
            opened = self._client(addresses)
        except OSError as error:  # its text names the file
            raise _NotAsked(f"token_file: {error}") from error
        except ValueError as error:
            raise _NotAsked(f"writer: {error}") from error
        try:
            async with opened as client:
                messages = map(info_message, infos)
                loaded = await client.ingest(load_id, messages, timeout_ms=timeout_ms)
        except LeaseIsLost as error:
            raise LeaseLost(str(error)) from error
        except LoadIsUnknown as error:
            raise LoadUnknown(str(error)) from error
        except Refused as error:
            raise InvalidRequest(error.field, str(error)) from error
        except (WrongDatabase, Unauthenticated, PermissionDenied) as error:
            raise _NotAsked(f"writer: {error}") from error
        return Committed(loaded.seq, loaded.already_applied)

    def _client(self, addresses: Sequence[str], timeout_ms: int = TIMEOUT_MS) -> Client:
        return Client(
            addresses,
            timeout_ms=timeout_ms,
            tls=self._tls,
            access_token_file=self._token_file,
        )

    def _pause_s(self, error: Exception) -> float:
        """Return the pause after an attempt has failed with `error`.

        After being fenced, it is a random time, longer with each time; after a refusal it is not
        brief, and as long as the server says.
        """
        if isinstance(error, _NotAsked) and isinstance(refusal := error.__cause__, ShaleKVError):
            return max(_REFUSED_PAUSE_S, (refusal.details.retry_after_ms or 0) / 1_000)
        self._fenced = self._fenced + 1 if isinstance(error, Fenced) else 0
        longest = min(2.0**self._fenced, _PAUSES_MAX)
        return _PAUSE_S * self._store.runtime.random.uniform(1, longest)

    def _addresses(self, named: str) -> Sequence[str] | None:
        """Return the addresses to ask; None: open the database. `named`: that of the manifest."""
        if self._writer == OPEN or (self._writer is None and not named):
            return None
        if self._writer is None:
            return [named]
        given = self._writer.split(",") if isinstance(self._writer, str) else [*self._writer]
        return [address.strip() for address in given]


def _given_up(load_id: str, error: Exception, *, is_unknown: bool) -> ShaleError:
    """Return the error for a commit whose last attempt before its deadline failed with `error`."""
    failed = f"load {load_id!r}: {error}."
    again = "run the load again with the same load_id"
    if is_unknown:
        again += ", which does nothing if it is committed"
        return OutcomeUnknown(f"{failed} It may be committed or not: {again}")
    return DeadlinePassed(f"{failed} It is not committed: {again}")


def _shown(addresses: Sequence[str]) -> str:
    return ", ".join(addresses)


def _unreachable(addresses: Sequence[str], error: Exception) -> InvalidSetting:
    message = (
        f"writer: no server answers at {_shown(addresses)} ({error}). If the database is served "
        f"elsewhere, pass writer='HOST:PORT'; if it is not served, pass writer='{OPEN}': the load "
        "is then committed by opening the database, which ends a writer that is still running"
    )
    return InvalidSetting(message)


class LoadOptions(TypedDict, total=False):
    """The options of a load; each has a default.

    - `on_duplicate`: ``error`` refuses two rows with one key; ``greatest:<column>`` and
      ``least:<column>`` load the row with the greatest or least value of that column, and refuse
      two different rows with the same value. Null loses against any value.
    - `writer`: HOST:PORT of the writer, or several; ``open``: open the database as its writer for
      the commit, which ends another writer; None: ask the writer that the manifest names, and open
      the database if it names none.
    - `tls`: how the writer is called with TLS (`shalekv_client.TlsOptions`); None: without.
    - `token_file`: the file with the access token that the writer is shown; None: none is.
    - `presorted`: every partition is sorted by key already, and no two overlap.
    - `partitions`: the number of partitions after sorting; None: Spark decides.
    - `key`, `value`, `op`, `expire_at`: names of columns. The latter two may be missing; the empty
      name says that they are.
    - `store`: settings of the store, as in server/docs/settings.md.
    - `levels`: settings of the files, from the same page.
    - `value_bytes_max`: the largest value; it should be the limit of the servers.
    - `lease_ttl_s`: how long files are kept after a crash of the driver.
    - `commit_timeout_s`: how long a commit without an answer is repeated.
    """

    on_duplicate: str
    writer: str | Sequence[str] | None
    tls: TlsOptions | None
    token_file: str | None
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
    """The database and the checked options of a load."""

    place: Place
    levels: LevelSettings
    limits: LimitSettings
    on_duplicate: str = "error"
    writer: str | Sequence[str] | None = None
    tls: TlsOptions | None = None
    token_file: str | None = None
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
        """Check these options and return the plan.

        Raises `InvalidUrl`, `InvalidSetting` for an option that is unknown or out of its limits,
        and `InvalidRequest` for an invalid `on_duplicate`.
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
        """Return the columns of a frame with this schema. Raises `InvalidRequest`."""
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
