"""A process that appends to a log until it is killed, and tells what is durable.

python -m tests.unit.store.member_log.appender <folder> <epoch>
"""

from __future__ import annotations

import sys
from pathlib import Path
from random import Random

from shalekv.core.quorum.acceptor import Effect, Flush, Save, Truncate, Write
from shalekv.core.quorum.messages import Health
from shalekv.core.quorum.record import Ballot
from shalekv.store.member_log.folder import DataFolder
from tests.kit.disks.member_logs import IDENTITY, records_after

SEGMENT_BYTES = 1 << 14


def payload_of(epoch: int, lsn: int) -> bytes:
    """What the process of this epoch writes there."""
    return bytes([epoch, lsn % 256]) * (lsn * 37 % 1500)


def main() -> None:
    """Append for ever. Each line says what is durable."""
    folder = DataFolder.open(Path(sys.argv[1]), segment_bytes=SEGMENT_BYTES)
    epoch = int(sys.argv[2])
    logs, _ = folder.open_logs()
    log = logs[0] if logs else folder.create(IDENTITY)
    random = Random(epoch)
    last = log.recovered.log.last
    log.perform([Save(Ballot(epoch, bytes(16)), Health.SOUND)])
    while True:
        effects: list[Effect] = []
        for _ in range(random.randint(1, 5)):
            new = records_after(last, [payload_of(epoch, last.lsn + 1)], epoch=epoch)
            last = new[-1].mark
            effects.append(Write(new))
        log.perform([*effects, Flush()])
        print("durable", last.lsn, flush=True)  # noqa: T201  (whoever started it reads this)
        if random.random() < 0.02:
            last = log.read(last.lsn - 2, last.lsn - 2, 0)[0].mark
            print("cut", last.lsn, flush=True)  # noqa: T201
            log.perform([Truncate(last), Flush()])


if __name__ == "__main__":
    main()
