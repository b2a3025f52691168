"""Installs the servers that tests need under .cache/servers, each once: `-m tests.servers.obtain`.

    versitygw    Go's module proxy, built here
    google       fake-gcs-server, likewise
    npm          azurite and s3rver, by npm/package-lock.json
    dynamodb     DynamoDB Local, from Maven Central by maven/pom.xml
    mariadb      Debian's archive, or what is installed
    postgres     Debian's archive, or what is installed
    redis        Debian's archive, or what is installed
    nginx        Debian's archive, or what is installed
    prometheus   Debian's archive, or what is installed: only if it is named
    h2spec       Go's module proxy, built here by tests/wire/interop/go
    etcd         Go's module proxy, built here by etcd/go.mod
    load         the client that puts servers under load, built from tests/bench/load
    slatedb      PyPI, by slatedb.txt; no server, but what benchmarks compare the engine with
    minio        Go's module proxy, built here, which takes minutes: only if it is named
    interop-go   gRPC's interop client and server: like h2spec, and only if it is named
    interop-java those of Java, from Maven Central: only if it is named
    interop-js   grpc-js, by npm: only if it is named

moto is not among them: it is a package of the Python environment. A server is
installed again when the file or the version that names it here has changed.
"""

from __future__ import annotations

import fcntl
import hashlib
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from tests.servers.debian import ObtainFailed, installed_usr, run, unpack

HERE = Path(__file__).parent
SERVERS = HERE.parents[1] / ".cache" / "servers"
VERSITYGW = "github.com/versity/versitygw/cmd/versitygw@v1.8.0"
# The last version of all: the repository is archived.
MINIO = "github.com/minio/minio@v0.0.0-20260212201848-7aac2a2c5b7c"
GOOGLE = "github.com/fsouza/fake-gcs-server@v1.56.1"
NPM_FILES = ("package.json", "package-lock.json")
POM = HERE / "maven" / "pom.xml"
INTEROP = HERE.parent / "wire" / "interop"
GO_FILES = (INTEROP / "go" / "go.mod", INTEROP / "go" / "go.sum")
H2SPEC = "github.com/summerwind/h2spec/cmd/h2spec"
GO_PEERS = ("google.golang.org/grpc/interop/client", "google.golang.org/grpc/interop/server")
INTEROP_POM = INTEROP / "java" / "pom.xml"
ETCD_FILES = [HERE / "etcd" / name for name in ("go.mod", "go.sum", "main.go")]
LOAD_FILES = sorted((HERE.parent / "bench" / "load").glob("*.go*"))
SLATEDB = HERE / "slatedb.txt"
COPY_JARS = "org.apache.maven.plugins:maven-dependency-plugin:3.8.1:copy-dependencies"
BUILD_S = 1_800.0  # MinIO takes four minutes of two cores, more on a busy machine


@dataclass(frozen=True, slots=True)
class Recipe:
    """Recipe to install a server in a folder; it is repeated when `version` is another one."""

    version: str
    install: Callable[[Path], None]
    is_for_all: bool = True  # False: only long tests need it


def obtained(name: str) -> Path:
    """The folder of that server, which is installed now if it isn't yet; raises `ObtainFailed`."""
    recipe = _recipes()[name]
    folder = SERVERS / name
    stamp = folder / "version"
    with _locked(SERVERS / f"{name}.lock"):
        if stamp.exists() and stamp.read_text() == recipe.version:
            return folder
        fresh = SERVERS / f"{name}.new"
        for old in (folder, fresh):
            shutil.rmtree(old, ignore_errors=True)
        fresh.mkdir()
        try:
            recipe.install(fresh)
        except ObtainFailed as error:
            raise ObtainFailed(f"{name} can't be obtained\n{error}") from error
        (fresh / "version").write_text(recipe.version)
        fresh.rename(folder)
    return folder


def main(names: list[str]) -> int:
    """Obtain the servers of these names, or those that all need; failures go to standard error."""
    recipes = _recipes()
    names = names or [name for name, recipe in recipes.items() if recipe.is_for_all]
    unknown = set(names) - set(recipes)
    if unknown:
        return _tell(f"no such server: {', '.join(sorted(unknown))}; there are {list(recipes)}")
    with ThreadPoolExecutor() as pool:
        failures = [failure for failure in pool.map(_attempt, names) if failure]
    return _tell("\n\n".join(failures)) if failures else 0


def _attempt(name: str) -> str | None:
    began = time.monotonic()
    try:
        obtained(name)
    except ObtainFailed as error:
        return str(error)
    took_s = time.monotonic() - began
    if took_s >= 1:
        _tell(f"obtained {name} in {took_s:.0f} s")
    return None


def _tell(text: str) -> int:
    sys.stderr.write(f"{text}\n")
    return 1


def _recipes() -> Mapping[str, Recipe]:
    return {
        "versitygw": Recipe(VERSITYGW, partial(_go, VERSITYGW)),
        "minio": Recipe(MINIO, partial(_go, MINIO), is_for_all=False),
        "google": Recipe(GOOGLE, partial(_go, GOOGLE)),
        "npm": _npm(HERE / "npm"),
        "dynamodb": _maven(POM),
        "mariadb": Recipe("mariadb-server-core", _mariadb),
        "postgres": Recipe("postgresql", _postgres),
        "redis": Recipe("redis-server redis-tools", _redis),
        "nginx": Recipe("nginx", _nginx),
        "prometheus": Recipe("prometheus", _prometheus, is_for_all=False),
        "h2spec": _go_tools(H2SPEC),
        "etcd": _go_program(ETCD_FILES),
        "load": _go_program(LOAD_FILES),
        "slatedb": Recipe(_digest(SLATEDB), _slatedb),
        "interop-go": replace(_go_tools(*GO_PEERS), is_for_all=False),
        "interop-java": replace(_maven(INTEROP_POM), is_for_all=False),
        "interop-js": replace(_npm(INTEROP / "js"), is_for_all=False),
    }


def _go(package: str, folder: Path) -> None:
    env = {"GOBIN": str(folder / "bin"), "CGO_ENABLED": "0"}  # it needs no C compiler
    run(["go", "install", package], within_s=BUILD_S, env=env)


def _go_tools(*packages: str) -> Recipe:
    """Tools of the module in tests/wire/interop/go, which pins all that they need."""

    def install(folder: Path) -> None:
        env = {"GOBIN": str(folder / "bin"), "CGO_ENABLED": "0"}
        run(["go", "install", *packages], within_s=BUILD_S, env=env, cwd=GO_FILES[0].parent)

    return Recipe(_digest(*GO_FILES), install)


def _go_program(files: Sequence[Path]) -> Recipe:
    """A module of our own with one program, which is then `folder`/program."""

    def install(folder: Path) -> None:
        argv = ["go", "build", "-mod=readonly", "-o", str(folder / "program"), "."]
        run(argv, within_s=BUILD_S, cwd=files[0].parent, env={"CGO_ENABLED": "0"})

    return Recipe(_digest(*files), install)


def _npm(project: Path) -> Recipe:
    files = [project / name for name in NPM_FILES]

    def install(folder: Path) -> None:
        for file in files:
            shutil.copy(file, folder)
        flags = ["--ignore-scripts", "--no-audit", "--no-fund", "--loglevel=error"]
        run(["npm", "ci", *flags], within_s=BUILD_S, cwd=folder)

    return Recipe(_digest(*files), install)


def _maven(pom: Path) -> Recipe:
    def install(folder: Path) -> None:
        argv = ["mvn", "--batch-mode", "--quiet", f"--file={pom}", COPY_JARS]
        argv += [f"-Dmaven.repo.local={folder / 'repository'}"]
        run([*argv, f"-DoutputDirectory={folder / 'lib'}"], within_s=BUILD_S)
        shutil.rmtree(folder / "repository")  # its jars have been copied

    return Recipe(_digest(pom), install)


def _mariadb(folder: Path) -> None:
    unpack(["mariadb-server-core"], folder, installed=installed_usr("sbin/mariadbd"))


def _postgres(folder: Path) -> None:
    installed = installed_usr("lib/postgresql/*/bin/postgres", "bin/postgres")
    unpack(["postgresql"], folder, installed=installed)


def _redis(folder: Path) -> None:
    unpack(["redis-server", "redis-tools"], folder, installed=installed_usr("bin/redis-benchmark"))


def _slatedb(folder: Path) -> None:
    """Install the package as a folder that `PYTHONPATH` may name: no test imports it."""
    argv = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    argv += ["--no-deps", "--require-hashes", f"--requirement={SLATEDB}"]
    run([*argv, f"--target={folder / 'site'}"], within_s=BUILD_S)


def _nginx(folder: Path) -> None:
    unpack(["nginx"], folder, installed=installed_usr("sbin/nginx"))


def _prometheus(folder: Path) -> None:
    unpack(["prometheus"], folder, installed=installed_usr("bin/promtool"))


def _digest(*files: Path) -> str:
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold the lock of `path`: a second process waits, and finds the work done."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
