r"""A pipeline from end to end, with real input: the Python packages that are installed here.

    shalekv serve --create --url "file://$PWD/catalog"
    python clients/spark/examples/package_catalog.py \
        --url "file://$PWD/catalog" --folder catalog-work

The second command, in a second terminal, runs these steps and prints a line for each:

    import     the metadata of packages becomes a Parquet file, which becomes one commit
    serve      gRPC clients read it, from the server of the first terminal
    feed       a stream reads the changes, counts them by package, and writes the counts back
    change     gRPC clients write; the stream continues where it was, with these changes only
    aggregate  a scan adds up the sizes of files by package, and the sums are written back
    export     the sums become Parquet

It may be run again: the load is not applied twice, and the stream continues.

Keys that belong together have a prefix in common:

    package/<name>            its version
    file/<name>/<path>        the size of the file, bytes
    changes/<name>            the number of changes of its files that the stream has read
    size/<name>               the bytes of its files

On a cluster, --url names a bucket, and --folder a place that all nodes reach; the rest is the same.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from uuid import uuid4

from pyspark.sql import Column, SparkSession
from pyspark.sql import functions as f

from shalekv_client import SyncClient
from shalekv_spark import bulk_load, export_parquet, import_parquet, register, scan, write_stream

CHANGED = "pyspark"  # the package of which files are changed
ROWS = "key binary, value binary"


@dataclass(frozen=True, slots=True)
class Places:
    """The places of the database and of files."""

    url: str  # the database
    addr: str  # its server, HOST:PORT
    folder: str  # of Parquet files, and the checkpoint of the stream


def packages() -> Iterator[tuple[bytes, bytes]]:
    """Iterate over keys and values of all packages that are installed here, each key once."""
    seen: set[str] = set()
    for package in metadata.distributions():
        name = package.metadata["Name"].lower()
        if name in seen:  # found twice on the path: the first one counts, as for imports
            continue
        seen.add(name)
        yield f"package/{name}".encode(), package.version.encode()
        for path in {str(file): file.size or 0 for file in package.files or ()}.items():
            yield f"file/{name}/{path[0]}".encode(), str(path[1]).encode()


def import_packages(spark: SparkSession, places: Places) -> None:
    """Write Parquet, and import it as one commit, unless it was committed before."""
    parquet = f"{places.folder}/packages.parquet"
    spark.createDataFrame([*packages()], ROWS).write.mode("overwrite").parquet(parquet)
    loaded = import_parquet(spark, parquet, places.url, load_id="packages")
    report("import", str(loaded))


def read_by_grpc(places: Places) -> None:
    """Read by gRPC: the server serves a load as soon as it is committed."""
    with SyncClient(places.addr) as client:
        found = client.get(f"package/{CHANGED}".encode())
        some = [entry.key.decode() for entry in client.scan(prefix=b"package/p", limit=3)]
    version = found.value.decode() if found else "not installed"
    report("serve", f"{CHANGED} is {version}; the first under package/p: {', '.join(some)}")


def count_changes(spark: SparkSession, places: Places) -> None:
    """Count the changes up to now by package, and write the counts that have changed."""
    changes = (
        spark.readStream.format("shalekv.changes")
        .option("url", places.url)
        .option("prefix", "file/")
        .option("startingOffset", "earliest")
        .option("consumer", "package-changes")
        .load()
    )
    counts = changes.groupBy(package_of("key").alias("package")).count()
    rows = counts.select(
        f.concat(f.lit("changes/"), "package").cast("binary").alias("key"),
        f.col("count").cast("string").cast("binary").alias("value"),
    )
    query = write_stream(
        rows,
        places.url,
        "package-changes",
        checkpoint=f"{places.folder}/checkpoint",
        output_mode="update",
        trigger={"availableNow": True},
    )
    query.awaitTermination()
    counted = scan(spark, places.url, prefix=b"changes/")
    sums = counted.agg(
        f.sum(f.col("value").cast("string").cast("long")).alias("changes"),
        f.count("key").alias("packages"),
    ).collect()[0]
    report("feed", f"{sums.changes:,} changes of files in {sums.packages} packages so far")


def change_by_grpc(places: Places) -> None:
    """Make three changes of a file while the stream is not running."""
    with SyncClient(places.addr) as client:
        client.put(f"file/{CHANGED}/notes.txt".encode(), b"12")
        client.put(f"file/{CHANGED}/notes.txt".encode(), b"1234")
        client.delete(f"file/{CHANGED}/notes.txt".encode())
    report("change", f"3 changes of a file of {CHANGED}")


def sum_sizes(spark: SparkSession, places: Places) -> None:
    """Add up the sizes in one consistent state; the sums are a load, which replaces older sums."""
    files = scan(spark, places.url, prefix=b"file/")
    sizes = files.groupBy(package_of("key").alias("package")).agg(
        f.sum(f.col("value").cast("string").cast("long")).alias("bytes")
    )
    rows = sizes.select(
        f.concat(f.lit("size/"), "package").cast("binary").alias("key"),
        f.col("bytes").cast("string").cast("binary").alias("value"),
    )
    loaded = bulk_load(rows, places.url, load_id=f"sizes {uuid4().hex}")
    report("aggregate", str(loaded))


def export_sizes(spark: SparkSession, places: Places) -> None:
    """Export the sums as Parquet, for programs that do not read the database."""
    parquet = f"{places.folder}/sizes.parquet"
    export_parquet(spark, places.url, parquet, prefix=b"size/", mode="overwrite")
    sizes = spark.read.parquet(parquet).select(
        package_of("key").alias("package"),
        f.col("value").cast("string").cast("long").alias("bytes"),
    )
    largest = sizes.orderBy(f.desc("bytes"), "package").limit(3).collect()
    shown = ", ".join(f"{row.package} ({row.bytes / 1e6:.1f} MB)" for row in largest)
    report("export", f"{sizes.count()} sums; the largest: {shown}")


def package_of(key: str) -> Column:
    """Return the name of the package in a key."""
    return f.split(f.col(key).cast("string"), "/")[1]


def report(step: str, what: str) -> None:
    """Print one line about a step."""
    sys.stdout.write(f"{step:<10} {what}\n")
    sys.stdout.flush()


def run(spark: SparkSession, places: Places) -> None:
    """Run all steps."""
    register(spark)
    import_packages(spark, places)
    read_by_grpc(places)
    count_changes(spark, places)
    change_by_grpc(places)
    count_changes(spark, places)
    sum_sizes(spark, places)
    export_sizes(spark, places)


def main() -> None:
    """Parse the arguments, and run."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--url", required=True, help="the database: file:///path or s3://...")
    parser.add_argument("--addr", default="127.0.0.1:7654", help="its server, HOST:PORT")
    parser.add_argument("--folder", required=True, help="for Parquet and the checkpoint")
    places = Places(**vars(parser.parse_args()))
    spark = SparkSession.builder.appName("package catalog").getOrCreate()
    try:
        run(spark, places)
    finally:
        spark.stop()


if __name__ == "__main__":
    main()
