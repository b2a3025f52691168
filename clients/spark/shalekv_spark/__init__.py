"""ShaleKV for Spark: scans, bulk loads, the change feed, an exactly-once sink, compaction.

    import shalekv_spark

    names = shalekv_spark.scan(spark, "s3://bucket/names")
    shalekv_spark.bulk_load(frame, "s3://bucket/names", load_id="names of November")
    shalekv_spark.register(spark)  # then: format("shalekv"), format("shalekv.changes")

Driver and tasks read and write the SSTs of a database in its object store. The server of the
database is used for one thing only: to write the record that commits a load.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from shalekv_spark.compaction.compact import compact
    from shalekv_spark.formats import register
    from shalekv_spark.loading.load import LoadResult, bulk_load, import_parquet
    from shalekv_spark.loading.sink import write_stream
    from shalekv_spark.scanning.export import Exported, export_parquet
    from shalekv_spark.scanning.frames import release
    from shalekv_spark.scanning.pinning import PinnedSnapshot, pin
    from shalekv_spark.scanning.scan import scan
    from shalekv_spark.scanning.stats import stats

__all__ = [
    "Exported",
    "LoadResult",
    "PinnedSnapshot",
    "bulk_load",
    "compact",
    "export_parquet",
    "import_parquet",
    "pin",
    "register",
    "release",
    "scan",
    "stats",
    "write_stream",
]

# Every process that plans or runs a task imports this package, so modules are loaded when used.
_PLACES = {
    "Exported": "scanning.export",
    "LoadResult": "loading.load",
    "PinnedSnapshot": "scanning.pinning",
    "bulk_load": "loading.load",
    "compact": "compaction.compact",
    "export_parquet": "scanning.export",
    "import_parquet": "loading.load",
    "pin": "scanning.pinning",
    "register": "formats",
    "release": "scanning.frames",
    "scan": "scanning.scan",
    "stats": "scanning.stats",
    "write_stream": "loading.sink",
}


def __getattr__(name: str) -> object:
    """Import a public name when it is first used. Raises `ImportError` without its packages."""
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        module = import_module(f"{__name__}.{_PLACES[name]}")
    except ModuleNotFoundError as missing:
        if (missing.name or "").startswith("shalekv"):
            raise
        raise ImportError(
            f"{__name__} needs packages that are not installed, such as {missing.name}. "
            "Install them: pip install 'shalekv[spark]'"
        ) from missing
    found: object = getattr(module, name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
