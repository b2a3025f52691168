"""The sink of streams: each batch of a streaming query is a load, so it is applied exactly once.

Spark runs a batch again when the query ended before Spark could record that the batch is done. The
batch then has the same rows and the same number, and by its load id, ``<name>-<batch>``, the
database recognizes that it has it. With a new checkpoint the numbers begin again, and would be
those of batches that were applied. So a name belongs to one checkpoint, and any other is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Unpack

from shalekv.errors import InvalidRequest, InvalidSetting, LoadUnknown
from shalekv.jobs.bulk_load import committed_seq
from shalekv.protocol.loads import CLOCK_MARGIN_MS, LOAD_ID_BYTES_MAX, check_load_id
from shalekv.store.manifests import StoredManifest
from shalekv_spark.bridge import StoreLoop
from shalekv_spark.loading.load import run_load
from shalekv_spark.loading.options import LoadOptions, LoadPlan
from shalekv_spark.place import Place

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

_CHECKPOINTS = "spark.sql.streaming.checkpointLocation"
_NUMBER_BYTES_MAX = 21  # of a batch in a load id, with the hyphen


def write_stream(
    df: DataFrame,
    url: str,
    name: str,
    *,
    checkpoint: str | None = None,
    trigger: Mapping[str, Any] | None = None,
    output_mode: str = "append",
    **options: Unpack[LoadOptions],
) -> StreamingQuery:
    """Start a query that applies the rows of the stream `df` to the database at `url`.

    Columns and `options` are those of `bulk_load`: upserts, and deletes by the column `op`. Several
    rows with one key in one batch need a rule, `on_duplicate`. `name` is the name of the query, and
    of the stream in the database, which remembers its last batch until 1,000
    other streams have committed since. `checkpoint` is the folder where Spark keeps the progress of
    the query; None: a folder with the name of the query, in the place that the session has for
    checkpoints. `trigger` is passed to Spark's `trigger`, such as ``{"availableNow": True}``.
    `output_mode` is that of Spark: with ``update``, an aggregate writes the groups that a batch has
    changed.

    Raises `InvalidRequest` for an unsuitable frame or name, `InvalidSetting` for an invalid option,
    or for a new checkpoint if the database has batches of this name, `LoadUnknown` for a checkpoint
    whose batches the database may have forgotten, and `DatabaseNotFound`. A batch that cannot be
    loaded ends the query.
    """
    check_name(name)
    plan = LoadPlan.of(url, options)
    if not df.isStreaming:
        raise InvalidRequest("df", "it is no stream: use bulk_load")
    plan.schema_of(df.schema)
    place = checkpoint or _default_checkpoint(df.sparkSession, name)
    began_ms, seq = _began_ms(df.sparkSession, place), _last_seq(plan.place, name, 0)
    if seq is None and began_ms is not None:
        _check_not_forgotten(plan.place, name, place, began_ms)
    if seq is not None and began_ms is None:
        message = (
            f"checkpoint: there is none at {place}, and the database has applied batches of the "
            f"stream {name!r}: those of a new checkpoint would count as applied. Name the one "
            "that the stream has, or choose another name"
        )
        raise InvalidSetting(message)

    def apply(batch: DataFrame, number: int) -> None:
        if _last_seq(plan.place, name, number + 1) is not None:
            message = (
                f"stream {name!r}: a batch after batch {number} is applied already, so another "
                "query has this name, or this one has lost its checkpoint. Nothing was applied"
            )
            raise InvalidSetting(message)
        run_load(batch, f"{name}-{number}", plan)

    writer = df.writeStream.queryName(name).foreachBatch(apply).option("checkpointLocation", place)
    writer = writer.outputMode(output_mode)
    if trigger is not None:
        writer = writer.trigger(**trigger)
    return writer.start()


def check_name(name: str) -> None:
    """Raise `InvalidRequest` unless a stream can have this name."""
    try:
        check_load_id(name)
    except InvalidRequest as error:
        raise InvalidRequest("name", error.problem) from None
    length, most = len(name.encode()), LOAD_ID_BYTES_MAX - _NUMBER_BYTES_MAX
    if length > most:
        problem = f"{length} bytes, and the name of a stream has {most} at most"
        raise InvalidRequest("name", problem)
    if not name.isprintable() or "/" in name:
        raise InvalidRequest("name", f"{name!r} has a character that is not printable, or a slash")


def _default_checkpoint(session: SparkSession, name: str) -> str:
    folder = session.conf.get(_CHECKPOINTS, None)
    if not folder:
        message = (
            f"checkpoint: name the folder for the progress of the query, here or in {_CHECKPOINTS}"
        )
        raise InvalidSetting(message)
    return f"{folder.rstrip('/')}/{name}"


def _check_not_forgotten(database: Place, name: str, checkpoint: str, began_ms: int) -> None:
    """Raise `LoadUnknown` if a query that began at `began_ms` may have had forgotten batches.

    REQUIRES: the database remembers no batch of the stream.
    """
    with StoreLoop(database) as loop:
        forgotten_ms = loop.run(StoredManifest(loop.store).refresh()).loads_forgotten_ms
    if forgotten_ms and began_ms <= forgotten_ms + CLOCK_MARGIN_MS:
        message = (
            f"stream {name!r}: the database remembers no batch of it, and has forgotten loads "
            f"since the checkpoint at {checkpoint} was made: its last batch is applied or not. "
            "Read to find out, and go on with a new checkpoint"
        )
        raise LoadUnknown(message)


def _began_ms(session: SparkSession, checkpoint: str) -> int | None:
    """Return when a query began with this checkpoint, on any file system; None: none has."""
    jvm: Any = session.sparkContext._jvm  # noqa: SLF001 - Python has no other way to Hadoop's files
    metadata = jvm.org.apache.hadoop.fs.Path(checkpoint, "metadata")
    configuration = session.sparkContext._jsc.hadoopConfiguration()  # noqa: SLF001 - as above
    files = metadata.getFileSystem(configuration)
    if not files.exists(metadata):
        return None
    return int(files.getFileStatus(metadata).getModificationTime())


def _last_seq(place: Place, name: str, number: int) -> int | None:
    """Return the sequence number of this batch or a later one; None: none was applied."""
    with StoreLoop(place) as loop:
        return loop.run(committed_seq(loop.store, StoredManifest(loop.store), f"{name}-{number}"))
