"""Runs the commands that obtain servers; one that fails is an error that shows it."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path


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
