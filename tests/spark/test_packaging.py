"""The pipeline on a cluster that has it only by ``--py-files``, and the requirements of `make`.

The cluster is Spark's own for tests: a master, a worker and an executor, each talking to the others
through sockets, and files reach the executor as on any cluster. The Python of its nodes sees the
packages of this environment, and not the repository: the folder of packages is a plain entry of its
path, so the ``.pth`` file of the editable install in it has no effect.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pyspark
import pytest

from tests.kit.processes.processes import Processes
from tests.spark.conftest import SparkDatabase

ROOT = Path(__file__).parents[2]
JOB = Path(__file__).with_name("submitted.py")
CLUSTER = "local-cluster[1,1,600]"  # a worker with a core and this many MiB
QUICK = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
NEEDED = ("bin", "jars", "python", "sbin")  # of an installation of Spark
SUBMITTED_S = 150.0


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of a node: it has what the pipeline needs, but not the pipeline."""
    folder = tmp_path_factory.mktemp("node")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    packages = next(folder.glob("lib/python*/site-packages"))
    (packages / "packages.pth").write_text(f"{sysconfig.get_path('purelib')}\n")
    found = folder / "bin" / "python"
    done = subprocess.run(
        [found, "-c", "import pyspark, pyarrow, numpy; import shalekv"],
        cwd=folder,
        env=without_paths(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert "No module named 'shalekv'" in done.stderr
    return found


@pytest.fixture(scope="module")
def archive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The zip of both distributions, made by the commands of server/docs/pipeline.md."""
    folder = tmp_path_factory.mktemp("packages")
    install = ["pip", "install", "--no-deps", "--no-build-isolation", "--target", str(folder)]
    projects = [str(ROOT), str(ROOT / "clients" / "python")]
    subprocess.run([sys.executable, "-m", *install, *projects], check=True, capture_output=True)
    found = folder / "shalekv.zip"
    create = ["zipfile", "--create", str(found), *map(str, folder.glob("shalekv*"))]
    subprocess.run([sys.executable, "-m", *create], check=True, capture_output=True)
    return found


@pytest.fixture
def spark_home(tmp_path: Path) -> Path:
    """An installation of Spark that may be written to: the worker keeps its files in it."""
    home = tmp_path / "spark"
    home.mkdir()
    for name in NEEDED:
        (home / name).symlink_to(Path(pyspark.__file__).with_name(name))
    return home


def without_paths() -> dict[str, str]:
    """Return the environment of the test without variables that direct Python and Spark."""
    reported = ("PYTHON", "PYSPARK_", "SPARK_")
    return {name: value for name, value in os.environ.items() if not name.startswith(reported)}


async def test_a_cluster_needs_the_zip_alone(
    processes: Processes, folder: SparkDatabase, python: Path, archive: Path, spark_home: Path
) -> None:
    """Driver and tasks find the pipeline in the zip, scan a database, and load into it."""
    server = await processes.serve(folder.url)
    rows = b"fruit/apple\tred\nfruit/kiwi\tgreen\nstone\tgrey\n"
    await processes.run("load", "--addr", server.listen, stdin=rows)
    assert await server.stop() == 0, server.report()
    submitted = await processes.run(
        *("--master", CLUSTER, "--driver-memory", "600m"),
        *("--conf", "spark.executor.memory=600m", "--conf", "spark.ui.enabled=false"),
        *("--conf", "spark.log.level=ERROR"),
        *("--conf", f"spark.driver.extraJavaOptions={QUICK}"),
        *("--conf", f"spark.executor.extraJavaOptions={QUICK}"),
        *("--conf", "spark.executorEnv.FRUIT_SEASON=autumn"),
        *("--py-files", str(archive), str(JOB), folder.url),
        program=str(spark_home / "bin" / "spark-submit"),
        env={
            "PATH": f"{python.parent}{os.pathsep}{os.environ['PATH']}",
            "PYSPARK_PYTHON": str(python),
            "PYSPARK_DRIVER_PYTHON": str(python),
            "PYTHONPATH": "",
            "SPARK_HOME": str(spark_home),
            "SPARK_LOCAL_IP": "127.0.0.1",
        },
        within_s=SUBMITTED_S,
        code=0,
    )
    reported = json.loads(submitted.stdout().splitlines()[-1])
    assert archive.name in Path(reported["driver"]).parts
    [[module, season]] = reported["task"]
    assert archive.name in Path(module).parts
    assert season == "autumn"
    assert reported["after"] == [["fruit/apple", "RED"], ["fruit/kiwi", "GREEN"]]


def test_make_reports_which_java_it_needs(tmp_path: Path) -> None:
    """Without Java, or with an old one, `make test` stops before anything is installed or run."""
    old = tmp_path / "old" / "bin" / "java"
    old.parent.mkdir(parents=True)
    old.write_text("#!/bin/sh\necho 'openjdk version \"11.0.2\" 2019-01-15' >&2\n")
    old.chmod(0o755)
    make = shutil.which("make")
    assert make is not None
    env = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    for home, found in ((tmp_path / "old", "11"), (tmp_path / "nowhere", "unknown")):
        done = subprocess.run(
            [make, "--directory", ROOT, "test"],
            env=env | {"JAVA_HOME": str(home)},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode != 0
        assert "Java 17" in done.stderr
        assert f"{home}/bin/java is version {found}" in done.stderr
