"""The example pipeline works when started as README.md describes: import to export."""

from __future__ import annotations

import re
from importlib import metadata
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from shalekv_client import SyncClient
from tests.kit.processes.processes import Processes
from tests.kit.processes.readme import ROOT, SERVE, terminals, type_in, with_shalekv

SESSION = (
    "--master local[2,3] --driver-memory 1g --conf spark.ui.enabled=false "
    "--conf spark.ui.showConsoleProgress=false --conf spark.sql.shuffle.partitions=2 "
    "--conf spark.log.level=ERROR --driver-java-options '-XX:TieredStopAtLevel=1 "
    "-XX:+UseSerialGC' pyspark-shell"
)
TYPED_S = 480.0


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A folder that has the example where the repository has it."""
    (tmp_path / "clients").symlink_to(ROOT / "clients")
    return tmp_path


@pytest.mark.timeout(600)
async def test_the_example_goes_all_the_way_round(processes: Processes, checkout: Path) -> None:
    """The export has what was imported, fed, aggregated and written back."""
    _, second = terminals("On Spark", lambda body: body.startswith(SERVE))
    server = await processes.serve(f"file://{checkout}/catalog")
    env = {"SHALEKV_ADDR": server.listen, "PYSPARK_SUBMIT_ARGS": SESSION}
    env |= {"SPARK_LOCAL_IP": "127.0.0.1", "PYSPARK_PYTHON": "python"}
    shell = await type_in(processes, checkout, with_shalekv(second), env=env, within_s=TYPED_S)
    reported = shell.stdout()
    package = metadata.distribution("pyspark")
    assert f"pyspark is {package.version};" in reported
    fed = [
        int(each.replace(",", ""))
        for each in re.findall(r"^feed +([\d,]+) changes", reported, re.MULTILINE)
    ]
    assert fed[1] == fed[0] + 3, reported  # the changes that came in between, and nothing again
    files = {str(file): file.size or 0 for file in package.files or ()}
    with SyncClient(server.listen) as client:
        assert len([*client.scan(prefix=b"file/", keys_only=True)]) == fed[0]
        counted = client.get(b"changes/pyspark")
        assert counted is not None
        assert int(counted.value) == len(files) + 3
        written_back = {each.key: each.value for each in client.scan(prefix=b"size/")}
    assert int(written_back[b"size/pyspark"]) == sum(files.values())
    exported = pq.read_table(checkout / "catalog-work" / "sizes.parquet")
    rows = zip(exported["key"].to_pylist(), exported["value"].to_pylist(), strict=True)
    assert dict(rows) == written_back
    assert await server.stop() == 0, server.report()
