"""Reads a Dockerfile: what the image starts, its user, and the folders that the user may write.

Supports what the files of docker/ use: `install --directory` makes folders, users are numbers.
"""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import dataclass

from tests.kit.compose_file import DOCKER

_MADE = re.compile(r"--(owner|group|mode)=(\d+)")


@dataclass(frozen=True, slots=True)
class Folder:
    """Owner and mode that a new volume takes over when it is mounted there."""

    uid: int
    gid: int
    mode: int


@dataclass(frozen=True, slots=True)
class Image:
    """The image that a Dockerfile describes."""

    instructions: tuple[tuple[str, str], ...]  # each with its arguments, on one line

    def arguments(self, word: str) -> list[str]:
        """The arguments of all instructions of this name."""
        return [rest for each, rest in self.instructions if each == word]

    @property
    def last_stage(self) -> Image:
        """The instructions of the last stage, which make the image itself."""
        words = [word for word, _ in self.instructions]
        return Image(self.instructions[len(words) - 1 - words[::-1].index("FROM") :])

    @property
    def user(self) -> tuple[int, int]:
        """The numbers of the user and of the group."""
        (user,) = self.arguments("USER")
        uid, gid = user.split(":")
        return int(uid), int(gid)

    @property
    def entrypoint(self) -> list[str]:
        """The program that every container starts."""
        (entrypoint,) = self.arguments("ENTRYPOINT")
        return list(json.loads(entrypoint))

    @property
    def folders(self) -> dict[str, Folder]:
        """The folders that the image makes, each with its owner and mode."""
        found: dict[str, Folder] = {}
        for command in self.last_stage.arguments("RUN"):
            program, *words = shlex.split(command)
            if program != "install" or "--directory" not in words:
                continue
            given = dict(_MADE.findall(" ".join(words)))
            folder = Folder(int(given["owner"]), int(given["group"]), int(given["mode"], 8))
            found |= {word: folder for word in words if word.startswith("/")}
        return found


def read_dockerfile(name: str) -> Image:
    """The image of this file of docker/."""
    text = (DOCKER / name).read_text(encoding="utf-8")
    text = re.sub(r"^#.*\n", "", text, flags=re.MULTILINE)
    lines = [line.strip() for line in text.replace("\\\n", " ").splitlines() if line.strip()]
    parts = [line.partition(" ") for line in lines]
    return Image(tuple((word, " ".join(rest.split())) for word, _, rest in parts))
