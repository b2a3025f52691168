"""The seed of a test run: new for each commit, the same for all runs of that commit.

It is derived from the commit id and, where files were changed since, from their contents.
TEST_SEED=N in the environment takes another one. The header of a run prints it.
"""

from __future__ import annotations

import functools
import hashlib
import os
import subprocess
from pathlib import Path
from random import Random

ROOT = Path(__file__).parents[2]
VARIABLE = "TEST_SEED"


@functools.cache
def run_seed() -> int:
    """The seed of this run, 0 to 2**32 - 1."""
    given = os.environ.get(VARIABLE)
    if given is None:
        digest = hashlib.sha256(_commit_id() + _changes()).digest()
        given = str(int.from_bytes(digest[:4], "big"))
        os.environ[VARIABLE] = given  # child processes use the same seed
    return int(given)


def random_of(purpose: str) -> Random:
    """A source of random numbers for one purpose, such as the id of a test."""
    return Random(f"{run_seed()}/{purpose}")


def _git(*arguments: str) -> bytes:
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, check=False)
    return done.stdout if done.returncode == 0 else b""


def _commit_id() -> bytes:
    return _git("rev-parse", "HEAD")


def _changes() -> bytes:
    """Digest of every change since the commit, untracked files included."""
    digest = hashlib.sha256(_git("diff", "HEAD"))
    for name in sorted(_git("ls-files", "--others", "--exclude-standard", "-z").split(b"\0")):
        path = ROOT / os.fsdecode(name)
        if name and path.is_file():
            digest.update(name + b"\0" + path.read_bytes())
    return digest.digest()
