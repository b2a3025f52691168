"""The engine without a transport: beside SlateDB's binding, gets from the levels, compaction."""

from __future__ import annotations

from tests.bench.peers import SITE
from tests.bench.plan import Found, Goal, Measure
from tests.bench.stage import ALONE, ROOT, Stage, status
from tests.servers.object_stores import versitygw
from tests.servers.obtain import obtained

OURS, SLATEDB = "ShaleKV", "SlateDB's binding"
BUCKET = "bench"
SPARK_S = 1_800.0
OPERATIONS = ("memory put", "batch put", "get", "scan")


async def engine(stage: Stage, found: Found) -> None:
    """Both work in a process of their own, on memory; the processor time of all threads counts."""
    entries = stage.sized(30_000, 2_000)
    for _ in range(stage.sized(3, 1)):
        own = await stage.program("engine", str(entries))
        peer = await _slatedb(stage, "memory", entries)
        for operation in OPERATIONS:
            found.add(operation, peer[operation]["CPU us"] / own[operation]["CPU us"])
        for side, figures in ((OURS, own), (SLATEDB, peer)):
            cpu = {f"{name}, us": each["CPU us"] for name, each in figures.items()}
            cpu.pop("warm-up, us", None)
            found.side(side, cpu)


async def _slatedb(stage: Stage, place: str, entries: int) -> dict[str, dict[str, float]]:
    paths = f"{ROOT}:{obtained('slatedb') / SITE}"
    folder = str(stage.new_folder("slatedb"))
    told: dict[str, dict[str, float]] = await stage.program(
        "slatedb_engine", place, folder, str(entries), env={"PYTHONPATH": paths}
    )
    return told


async def levels(stage: Stage, found: Found) -> None:
    """Gets of keys that are in SSTs, of 16 callers in the process of the reader."""
    rows, gets = stage.sized((200_000, 4_000), (5_000, 100))
    for _ in range(stage.sized(2, 1)):
        folder, disk = stage.new_folder("levels"), str(stage.new_folder("disk"))
        local = await stage.program("levels", f"file://{folder}/db", str(rows), str(gets), disk)
        with versitygw() as server:
            server.create_bucket(BUCKET)
            argv = (f"s3://{BUCKET}/levels", str(rows), str(gets // 10), disk, server.endpoint)
            far = await stage.program("levels", *argv, env=server.environment)
        peer = await _slatedb(stage, "levels", stage.sized(30_000, 2_000))
        for key, told in (
            ("cached", local["cached"]),
            ("file", local["not cached"]),
            ("s3", far["not cached"]),
            ("disk", far["on disk"]),
        ):
            found.add(key, told["CPU us"])
            found.side(f"{OURS}, {key}", told)
        found.add("cached_peer", peer["cached get"]["CPU us"] / local["cached"]["CPU us"])
        found.add("file_peer", peer["file get"]["CPU us"] / local["not cached"]["CPU us"])
        found.add("requests", far["not cached"]["requests"])
        found.add("missing", far["missing, not cached"]["requests"])
        found.side(f"{SLATEDB}, cached", peer["cached get"])
        found.side(f"{SLATEDB}, file", peer["file get"])


async def compaction(stage: Stage, found: Found) -> None:
    """A merge of four runs that overlap everywhere."""
    for codec in stage.sized(("none", "lz4"), ("lz4",)):
        told = await stage.program("compaction", str(stage.sized(125_000, 2_000)), codec)
        found.add(codec, *(rate / 1e6 for rate in told["rates"]))


async def opening(stage: Stage, found: Found) -> None:
    """A writer opens a database of 10,000 SSTs on a folder."""
    count = stage.sized(10_000, 100)
    for _ in range(stage.sized(3, 1)):
        folder = stage.new_folder("wide")
        await stage.program("wide_database", str(folder), str(count))
        server = await stage.serve(f"file://{folder}", *ALONE)
        told = await status(server.address)
        assert told.manifest.leveled_ssts == count
        found.add("open", told.writer.open_ms / 1_000)
        found.add("requests", sum(each.requests for each in told.store_requests))
        await server.stop()


async def spark(stage: Stage, found: Found) -> None:
    """The pipeline beside Parquet in one session, on both processors."""
    folder, rows = stage.new_folder("spark"), stage.sized(1_000_000, 400)
    argv = (str(folder), str(rows), str(stage.sized(3, 1)))
    told = await stage.program("spark", *argv, within_s=SPARK_S)
    for name, taken_s in told.items():
        for each in taken_s:
            found.side(name, {"s": each, "rows/s": rows / each})
    found.ratio("load", "rows/s", "load", "load, Parquet")
    found.ratio("scan", "rows/s", "scan", "scan, Parquet")
    found.ratio("merged", "rows/s", "scan of overlapping loads", "scan, Parquet")
    found.ratio("compaction", "rows/s", "compaction", "compaction, scan and load")


ENGINE = Measure(
    "engine",
    "the engine without a transport beside SlateDB's binding",
    (
        Goal("memory put", "puts acknowledged from memory per CPU second, SlateDB = 1", at_least=5),
        Goal("batch put", "rows of batches of 1,000, SlateDB = 1", at_least=10),
        Goal("get", "gets of what was written last, SlateDB = 1", at_least=5),
        Goal("scan", "rows of a scan, SlateDB = 1", at_least=2),
    ),
    engine,
    takes=(
        "A row of a batch costs 3.7 us: key and value out of protobuf's objects 30 %, the columns "
        "of the WAL object 25 %, merges of runs 15 %, and the memtable 30 %. Half of a row of a "
        "scan is memory that no processor's cache holds: entry, key and value are objects of their "
        "own; the rest is a merge of runs by a dict, and six pieces of its message."
    ),
)
LEVELS = Measure(
    "levels",
    "gets from the levels, in the process of a reader",
    (
        Goal("cached", "CPU of a get, block cached", at_most=25, stretch=15, unit=" us"),
        Goal("file", "CPU of a get, block from a local file", at_most=200, stretch=120, unit=" us"),
        Goal("s3", "CPU of a get, block from S3", at_most=500, stretch=300, unit=" us"),
        Goal("disk", "CPU of a get from S3, block in the cache on disk", unit=" us"),
        Goal("cached_peer", "cached gets per CPU second, SlateDB's binding = 1", at_least=5),
        Goal("file_peer", "gets from files per CPU second, SlateDB's binding = 1"),
        Goal("requests", "data GETs for a cold get, a filter in 100 errs", at_most=1.02),
        Goal("missing", "data GETs for a key that is not there", at_most=0.01),
    ),
    levels,
    takes=(
        "Of a get whose block is cached, 14 % are the filters of six SSTs, 24 % the search in the "
        "block and what is read there, 11 % the search in the index, 10 % the SSTs and their "
        "metadata, 20 % the call and its reply around that, and 10 % the benchmark's own parser: "
        "it would take compiled code (mypyc). SlateDB has one SST here. Of a get from S3, 40 % are "
        "aiohttp (of which 16 the system call that sends), 14 % the event loop, 18 % tasks, caches "
        "and counts between both, 8 % signing and names, 9 % checking and searching the block. A "
        "client in Rust (`obstore`) would take a quarter less of a read of a part: 70 us."
    ),
)
COMPACTION = Measure(
    "compaction",
    "merge of four runs of 16 B + 100 B on one core",
    (
        Goal("lz4", "million entries per CPU second, LZ4", at_least=1),
        Goal("none", "million entries per CPU second, not compressed"),
    ),
    compaction,
    takes=(
        "Columns are merged by numpy; keys, blocks and filters pass through Python objects. Arrow "
        "would keep them in columns (three times as fast, measured), as a dependency of 40 MB."
    ),
)
OPENING = Measure(
    "open",
    "opening a database of 10,000 SSTs",
    (
        Goal("open", "until it serves", at_most=2, unit=" s"),
        Goal("requests", "store requests", at_most=100),
    ),
    opening,
)
SPARK = Measure(
    "spark",
    "the pipeline beside Parquet in one Spark session",
    (
        Goal("load", "rows/s of a load, sorted Parquet = 1"),
        Goal("scan", "rows/s of a scan, Parquet = 1"),
        Goal("merged", "rows/s of a scan of four loads that overlap, Parquet = 1"),
        Goal("compaction", "rows/s of a compaction, scan and load = 1"),
    ),
    spark,
    is_long=True,  # Java compiles for minutes
)
MEASURES = (ENGINE, LEVELS, COMPACTION, OPENING, SPARK)
