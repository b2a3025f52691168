"""Programs from Debian's archive without root: packages are downloaded and unpacked into a folder.

What the machine has already, such as its C library, is not downloaded again. Where this can't be
done, an installed program serves as well.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

# Dependencies that the programs run without: a JIT, scripts, system maintenance.
NOT_NEEDED = re.compile(
    r"libllvm|perl|adduser|debconf|dpkg|ssl-cert|openssl$|passwd|sysvinit|lsb-|tar$|sensible-utils"
    r"|postgresql-common|postgresql-client-common|postgresql$|tzdata|logsave|netbase|ucf|readline"
)
SIMULATED = re.compile(r"^Inst (\S+)", re.MULTILINE)


class ObtainFailed(Exception):
    """A server could not be obtained."""


def run(
    argv: Sequence[str],
    *,
    within_s: float,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
) -> str:
    shown = " ".join(argv)
    if shutil.which(argv[0]) is None:
        raise ObtainFailed(f"$ {shown}\n{argv[0]} is not on the path")
    try:
        ran = subprocess.run(
            argv,
            cwd=cwd,
            env=os.environ | dict(env or {}),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
            timeout=within_s,
        )
    except subprocess.TimeoutExpired as error:
        raise ObtainFailed(f"$ {shown}\nit took longer than {within_s} s") from error
    if ran.returncode != 0:
        raise ObtainFailed(f"$ {shown}\n(exit code {ran.returncode})\n{ran.stdout}{ran.stderr}")
    return ran.stdout


def unpack(packages: Sequence[str], folder: Path, *, installed: Path | None) -> None:
    """The `usr` of `packages` and of what they need, as `folder`/usr; else a link to `installed`.

    `installed` is the /usr where the program was found, None when the machine does not have it.
    """
    try:
        _download(packages, folder)
    except ObtainFailed:
        if installed is None:
            raise
        (folder / "usr").symlink_to(installed)


def libraries(usr: Path) -> dict[str, str]:
    """The environment in which the programs of an unpacked `usr` find their shared libraries."""
    folders = sorted(str(found) for found in usr.glob("lib/*-linux-gnu*"))
    return {"LD_LIBRARY_PATH": ":".join(folders)}


def _download(packages: Sequence[str], folder: Path) -> None:
    apt = _apt(folder / "apt")
    run([*apt, "update"], within_s=120)
    simulated = run([*apt, "-s", "--no-install-recommends", "install", *packages], within_s=60)
    present = set(
        run(["dpkg-query", "-W", "-f", "${Package}\n"], within_s=60).split()  # of this machine
    )
    wanted = [
        name
        for name in SIMULATED.findall(simulated)
        if not NOT_NEEDED.search(name) and (name not in present or _is_program(name, packages))
    ]
    run([*apt, "download", *wanted], within_s=300, cwd=folder / "apt")
    for package in sorted((folder / "apt").glob("*.deb")):
        run(["dpkg", "-x", str(package), str(folder)], within_s=120)
    run(["rm", "-rf", str(folder / "apt")], within_s=60)


def _is_program(name: str, packages: Sequence[str]) -> bool:
    """Return whether it belongs to one of `packages`: `postgresql` includes `postgresql-15`."""
    return any(re.fullmatch(rf"{package}(-client)?(-\d+)?", name) for package in packages)


def _apt(folder: Path) -> list[str]:
    """apt-get with lists of its own: those of the system may be missing, and are root's to write.

    Nothing counts as installed, so that the simulation names all that the packages need.
    """
    for name in ("lists/partial", "cache/archives/partial"):
        (folder / name).mkdir(parents=True)
    (folder / "status").touch()
    options = {
        "Dir::State::lists": f"{folder}/lists",
        "Dir::State::status": f"{folder}/status",
        "Dir::Cache": f"{folder}/cache",
        "Acquire::Languages": "none",
        "APT::Sandbox::User": "",
        "Debug::NoLocking": "1",
    }
    return ["apt-get", "-qq", *(f"-o{name}={value}" for name, value in options.items())]


def installed_usr(*patterns: str) -> Path | None:
    """/usr or /usr/local, whichever has a file that matches one of `patterns`."""
    for usr in (Path("/usr"), Path("/usr/local")):
        if any(any(usr.glob(pattern)) for pattern in patterns):
            return usr
    return None
