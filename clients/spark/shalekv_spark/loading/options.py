"""The options of a load, checked before anything is asked of Spark or of a store."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypedDict

from shalekv.errors import InvalidSetting
from shalekv.jobs.bulk_load import LEASE_TTL_S
from shalekv.settings import LevelSettings, LimitSettings
from shalekv_client.channel import checked_addresses
from shalekv_spark.arguments import settings_of
from shalekv_spark.loading.commit import OPEN
from shalekv_spark.loading.schema import DuplicateRule, LoadSchema
from shalekv_spark.place import Place

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

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
