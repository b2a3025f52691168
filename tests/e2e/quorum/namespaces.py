"""Machines of their own on one machine: network namespaces, joined by a switch.

Needs root and `ip`. Each machine has an address that the tests reach, and a route to another one
can be taken away in one direction: then packets vanish, as in a real network, and nobody is told.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from secrets import token_hex

import pytest


class NamespacesRefused(Exception):
    """There are no network namespaces to be had here: why."""


class Namespaces:
    """Machines 2, 3, ... of a network; the tests are machine 1."""

    def __init__(self) -> None:
        """`namespaces` makes it."""
        self._name = f"skv{token_hex(3)}"
        self._net = f"10.213.{os.getpid() % 250 + 1}"
        self._made: list[str] = []
        self.own_address = f"{self._net}.1"

    def add(self, count: int) -> list[str]:
        """So many more machines; their names."""
        return [self._add() for _ in range(count)]

    def address(self, space: str) -> str:
        """The host's address of one."""
        return f"{self._net}.{self._made.index(space) + 1}"

    def cut(self, space: str, to: str) -> None:
        """What one sends to another vanishes."""
        _ip("-n", space, "route", "replace", "blackhole", f"{self.address(to)}/32")

    def heal(self, space: str, to: str) -> None:
        """It arrives again."""
        _ip("-n", space, "route", "del", "blackhole", f"{self.address(to)}/32")

    def open(self) -> None:
        """Make the switch, and the way of the tests to it."""
        if shutil.which("ip") is None:
            raise NamespacesRefused("there is no `ip` (iproute2)")
        switch = self._make()
        _ip("-n", switch, "link", "add", "switch", "type", "bridge")
        _ip("-n", switch, "link", "set", "switch", "up")
        own = f"{self._name}-1"
        _ip("link", "add", own, "type", "veth", "peer", "name", "v1", "netns", switch)
        _ip("addr", "add", f"{self.own_address}/24", "dev", own)
        _ip("link", "set", own, "up")
        _ip("-n", switch, "link", "set", "v1", "master", "switch", "up")

    def close(self) -> None:
        """Take all of it away: the pairs of devices go with their namespaces."""
        for space in reversed(self._made):  # empty where there is no `ip`
            subprocess.run(["ip", "netns", "del", space], check=False, capture_output=True)

    def _make(self) -> str:
        space = f"{self._name}-{len(self._made)}"
        _ip("netns", "add", space)
        self._made.append(space)
        _ip("-n", space, "link", "set", "lo", "up")
        return space

    def _add(self) -> str:
        switch, space = self._made[0], self._make()
        port = f"v{len(self._made)}"
        _ip(
            "-n",
            space,
            "link",
            "add",
            "eth0",
            "type",
            "veth",
            "peer",
            "name",
            port,
            "netns",
            switch,
        )
        _ip("-n", space, "addr", "add", f"{self.address(space)}/24", "dev", "eth0")
        _ip("-n", space, "link", "set", "eth0", "up")
        _ip("-n", switch, "link", "set", port, "master", "switch", "up")
        return space


@contextmanager
def namespaces(count: int) -> Iterator[tuple[Namespaces, list[str]]]:
    """A network of so many machines, which goes with the test; without one the test is skipped."""
    network = Namespaces()
    try:
        try:
            network.open()
            spaces = network.add(count)
        except NamespacesRefused as error:
            pytest.skip(f"no network namespaces here: {error}")
        yield network, spaces
    finally:
        network.close()


def _ip(*argv: str) -> None:
    done = subprocess.run(["ip", *argv], check=False, capture_output=True, text=True)
    if done.returncode:
        raise NamespacesRefused(f"`ip {' '.join(argv)}`: {done.stderr.strip()}")
