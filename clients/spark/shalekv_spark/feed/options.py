"""The options of ``shalekv.changes``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pyspark.sql.streaming.datasource import ReadLimit, ReadMaxBytes, ReadMaxFiles

from shalekv.errors import InvalidRequest, InvalidSetting
from shalekv.protocol.entry import KeyRange, prefix_end
from shalekv.watch.consumers import holder_of
from shalekv_spark.options import Options
from shalekv_spark.place import Place

EARLIEST = "earliest"
LATEST = "latest"
FILES_PER_TRIGGER = 1_000
NO_LIMIT = 1 << 62
CONSUMER_TTL_S = 86_400  # the default of the server's consumer_lease_ttl_s
CONSUMER_TTL_S_MAX = 31_536_000
PARTITION_BYTES = 32 << 20
ALL_KEYS = KeyRange(b"", b"")
POLL_MS = 500  # between two polls of the store while nothing new is found


@dataclass(frozen=True, slots=True, kw_only=True)
class FeedOptions:
    """The parsed options of a stream: a value that Spark sends to its tasks."""

    place: Place
    start: int | None = None  # a WAL id; None: see `from_earliest`
    from_earliest: bool = False
    consumer: str = ""  # empty: nothing keeps the log for the stream
    consumer_ttl_s: int = CONSUMER_TTL_S
    files_max: int = FILES_PER_TRIGGER
    bytes_max: int = NO_LIMIT
    keys: KeyRange = ALL_KEYS
    partition_bytes: int = PARTITION_BYTES
    poll_ms: int = POLL_MS

    @classmethod
    def of(cls, given: Mapping[str, str]) -> FeedOptions:
        """Parse the options that Spark passes. Raises `InvalidSetting` and `InvalidUrl`."""
        options = Options(given)
        place = options.place()
        start = options.text("startingOffset", LATEST).strip().lower()
        found = cls(
            place=place,
            start=_wal_id(start),
            from_earliest=start == EARLIEST,
            consumer=_consumer(options),
            consumer_ttl_s=options.number("consumerTtl", CONSUMER_TTL_S, at_least=10),
            files_max=min(options.number("maxWalFilesPerTrigger", FILES_PER_TRIGGER), NO_LIMIT),
            bytes_max=options.number("maxBytesPerTrigger", NO_LIMIT),
            keys=_keys(options),
            partition_bytes=options.number("partitionBytes", PARTITION_BYTES),
            poll_ms=options.number("pollIntervalMs", POLL_MS, at_least=0),
        )
        options.check_all_taken()
        if found.consumer_ttl_s > CONSUMER_TTL_S_MAX:
            raise InvalidSetting(f"option consumerTtl: expected at most {CONSUMER_TTL_S_MAX} s")
        return found

    def limits(self, limit: ReadLimit) -> tuple[int, int]:
        """Return the WAL objects and bytes that a batch may have when Spark passes this limit.

        A trigger that takes everything there is (``once``) overrides the options.
        """
        if isinstance(limit, ReadMaxFiles):
            return limit.max_files, self.bytes_max
        if isinstance(limit, ReadMaxBytes):
            return self.files_max, limit.max_bytes
        return NO_LIMIT, NO_LIMIT


def _wal_id(text: str) -> int | None:
    if text in (EARLIEST, LATEST):
        return None
    if not (text.isascii() and text.isdigit()):
        expected = f"{EARLIEST}, {LATEST} or the id of a WAL object"
        raise InvalidSetting(f"option startingOffset: expected {expected}, found {text!r}")
    return int(text)


def _consumer(options: Options) -> str:
    name = options.text("consumer")
    if name:
        try:
            holder_of(name)
        except InvalidRequest as error:
            raise InvalidSetting(f"option {error}") from None
    return name


def _keys(options: Options) -> KeyRange:
    decode = options.key_decoding()
    prefix = options.key("prefix", decode)
    start, end = options.key("start", decode), options.key("end", decode)
    if prefix is not None:
        if start is not None or end is not None:
            raise InvalidSetting("option prefix: start or end was given as well: give either")
        return KeyRange(prefix, prefix_end(prefix))
    keys = KeyRange(start or b"", end or b"")
    if keys.is_empty:
        raise InvalidSetting("option end: the range from start to end is empty")
    return keys
