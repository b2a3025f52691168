"""The processes of one database: each role a process of its own, with settings that make haste.

What takes minutes and days in earnest takes a second or two here: ages, leases, snapshots. A
process may be started so that it stops itself at one of its requests to the store, its `pin`; and
collectors keep a copy of what they delete, for the judgement.
"""

from __future__ import annotations

import enum
import sys
from pathlib import Path
from random import Random

from shalekv.cli.exit_codes import ExitCode
from tests.e2e.crashes.moments import WITHIN_S
from tests.e2e.crashes.places import Place
from tests.e2e.crashes.servers import Servers
from tests.kit.processes.bucket_troubles import event
from tests.kit.processes.child import Child, Line
from tests.kit.processes.processes import SHALEKV, Processes

COLLECT_AGE_MS = 1_000
LIFE_S = "2"  # of leases and of the snapshots of servers, the least that there is
LOGS = ("--log-format", "json")
STILL = "T"  # the state of a process that was stopped, as the kernel tells it


class Role(enum.Enum):
    """What a process is."""

    WRITER = "writer"
    COMPACTOR = "compactor"
    COLLECTOR = "collector"
    READER = "reader"


FLAGS = {
    Role.WRITER: (
        *("serve", "--create", "--no-with-compactor", "--no-with-collector"),
        *("--snapshot-ttl-s", LIFE_S, "--flush-interval-ms", "10", "--wal-codec", "none"),
        *("--fence-poll-ms", "500"),
    ),
    Role.COMPACTOR: (
        *("compactor", "--compactor-poll-ms", "100", "--compactor-idle-poll-ms", "200"),
        *("--wal-trigger-count", "6", "--wal-trigger-age-ms", "400"),
        *("--wal-trigger-bytes", "32768", "--l0-trigger-count", "2"),
        *("--base-level-bytes", "65536", "--level-multiplier-count", "2"),
        *("--sst-bytes", "65536", "--block-bytes", "4096", "--codec", "none"),
        *("--compactor-lease-ttl-s", LIFE_S),
    ),
    Role.COLLECTOR: (
        *("collector", "--collect-interval-ms", "150", "--wal-retention-s", "2"),
        *("--collect-age-s", str(COLLECT_AGE_MS // 1_000)),
    ),
    Role.READER: (
        *("reader", "--poll-interval-ms", "50", "--manifest-interval-ms", "200"),
        *("--reader-snapshot-ttl-s", LIFE_S),
    ),
}
# In the middle of what a process of a role does once it is at work, and how often before.
PINS = {
    Role.WRITER: [
        ("before create wal/", 15, 40),
        ("after create wal/", 15, 40),
        ("before create manifest/", 6, 9),
        ("after create manifest/", 6, 9),
    ],
    Role.COMPACTOR: [
        ("before create levels/", 1, 6),
        ("after create levels/", 1, 6),
        # Behind its claim, however often that met edits of others: else it is not overtaken there.
        ("before create manifest/", 4, 9),
        ("after create manifest/", 4, 9),
    ],
    Role.COLLECTOR: [("after list levels/", 2, 6), ("after list wal/", 2, 6)],
    # Readers are met at any moment: they change nothing but their own snapshots.
}
LISTENING = (Role.WRITER, Role.READER)


def draw_pin(role: Role, random: Random) -> str:
    """A moment in the middle of the work of a role; empty: any moment."""
    if role not in PINS:
        return ""
    what, first, last = random.choice(PINS[role])
    return f"{what} {random.randint(first, last)}"


class Fleet:
    """Starts the processes of one database, and looks at what they log."""

    def __init__(self, processes: Processes, place: Place, kept: Path, random: Random) -> None:
        """Nothing runs. What collectors delete goes to the folder `kept`."""
        self.place = place
        self.servers = Servers()
        self._processes = processes
        self._kept = kept
        self._random = random
        self._started: dict[Role, list[Child]] = {role: [] for role in Role}

    def start(self, role: Role, *, pin: str = "", listen: str = "127.0.0.1:0") -> Child:
        """Start a process, and don't wait."""
        argv = [*FLAGS[role], "--url", self.place.url, *LOGS, *self.place.flags]
        if role in LISTENING:
            argv += ["--listen", listen]
        if role is Role.WRITER:
            argv += ["--max-parallel-writes", str(self._random.choice([1, 4]))]
        program = SHALEKV
        if role is Role.COLLECTOR:
            keeping = [
                "-m",
                "tests.kit.processes.keeping",
                str(self._kept),
                self.place.endpoint,
                pin,
            ]
            program, argv = sys.executable, [*keeping, *argv]
        elif pin:
            program, argv = sys.executable, ["-m", "tests.e2e.stalling", pin, *argv]
        child = self._processes.start(*argv, program=program, env=self.place.troubled)
        self._started[role].append(child)
        return child

    def deletions(self) -> int:
        """How many objects collectors have deleted."""
        return sum(
            line["deleted_objects"]
            for child in self._started[Role.COLLECTOR]
            for line in events(child, "collected")
        )

    def compactions(self) -> int:
        """How many compactions were published."""
        return sum(len(events(child, "compacted")) for child in self._started[Role.COMPACTOR])

    async def stop(self) -> None:
        """Ask all that run to end, which they must do well."""
        for children in self._started.values():
            for child in filter(lambda child: child.running, children):
                child.resume()  # it may stand at its pin
                assert await child.stop(within_s=WITHIN_S) == ExitCode.OK, child.report()


def events(child: Child, name: str) -> list[Line]:
    """The log lines of one event."""
    return list(filter(event(name), child.lines()))


def is_still(child: Child) -> bool:
    """Whether a process was stopped, by itself or by somebody else."""
    try:
        stat = Path(f"/proc/{child.pid}/stat").read_text()
    except FileNotFoundError:
        return False
    return stat.rpartition(")")[2].split()[0] == STILL
