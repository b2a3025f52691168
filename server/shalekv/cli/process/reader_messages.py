r"""Messages between `cli.process.reader` and its parent, `cli.process.reader_parent`.

Standard input of the one is a socket to the other; messages are lines of JSON. Connections come
through another socket, whose number is the argument of the process.

    parent                                             this process
      begin: number, settings ----------------------->  opens the database
      <------------------------------------- serving    answers connections
      ping: trouble of the others ------------------->  every second
      <----------------- pong: own trouble, connections
      <------------------------------ answer to "stats"  so that it survives this process
      <-------------------------------------- ending    gets no more connections
      <---------------------------------------- collect  somebody asks for a part of all
      whole: all processes, answers of the others --->
      ask ------------------------------------------->  somebody asks another process
      <---------------------------------------- answer
      <-------------------------------------- withdraw  who has asked for a profile has gone
      withdraw -------------------------------------->  ends it
      reopen ---------------------------------------->  opens the audit log again
      stop ------------------------------------------>  drains, and ends
      the end of the socket ------------------------->  the parent has ended: the same;
                                                        after `stop`: ends at once
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator

from pydantic import BaseModel, ConfigDict

from shalekv.settings import ReaderConfig

MESSAGE_BYTES_MAX = 64 << 20  # a status of 1,000 snapshots takes 100 KB
# Answers in one message, where base64 makes them a third longer: long profiles of many processes.
ANSWERS_BYTES_MAX = MESSAGE_BYTES_MAX // 2


class _Message(BaseModel):
    model_config = ConfigDict(frozen=True, ser_json_bytes="base64", val_json_bytes="base64")

    def line(self) -> bytes:
        """Encode the message as a line."""
        return self.model_dump_json(exclude_defaults=True).encode() + b"\n"


class Asked(enum.StrEnum):
    """Question to one process that is answered for all of them."""

    STATUS = "status"  # `admin_pb2.StatusReply`
    METRICS = "metrics"  # `Metrics.encode`
    STATS = "stats"  # `admin_pb2.StatsReply`
    SLOW_CALLS = "slow_calls"  # `admin_pb2.ListSlowCallsReply`
    PROFILE = "profile"  # `telemetry.profile.take_samples`


class Question(_Message):
    """Question to all processes. Equal ones that are asked at the same time get one answer."""

    asked: Asked
    duration_ms: int = 0  # of a profile
    profile_id: str = ""  # of a profile: it has no equal


class ChildTrouble(_Message):
    """The reason why a process cannot answer reads, and for how long."""

    cause: str
    problem: str
    duration_ms: int


class Begin(_Message):
    """The first message to a process."""

    number: int
    settings: ReaderConfig


class ChildState(_Message):
    """One process, as its parent knows it."""

    number: int
    state: int  # `admin_pb2.ProcessStatus.State`
    pid: int
    uptime_ms: int
    replacements: int
    began_ms: int  # since the first process with this number was started
    # Empty: of the process that asks, or no answer. Statistics are those of all with this number.
    answer: bytes = b""


class Whole(_Message):
    """All processes; empty at a parent that is stopping."""

    question: Question
    uptime_ms: int = 0
    children: tuple[ChildState, ...] = ()
    metrics: bytes = b""  # in place of them: the sum over all but the process that asks


class ToChild(_Message):
    """A message of the parent: one of these."""

    begin: Begin | None = None
    is_ping: bool = False
    trouble: ChildTrouble | None = None  # with a ping: of another process
    ask: Question | None = None
    withdraw: Question | None = None
    is_reopen: bool = False
    whole: Whole | None = None
    is_stop: bool = False


class Pong(_Message):
    """The answer to a ping."""

    trouble: ChildTrouble | None = None
    connections: int = 0


class ToParent(_Message):
    """A message to the parent: one of these."""

    is_serving: bool = False
    is_ending: bool = False
    pong: Pong | None = None
    collect: Question | None = None
    withdraw: Question | None = None
    answers: Question | None = None  # also without having been asked
    answer: bytes = b""  # with `answers`; empty: it cannot say


def fitting(answers: Iterable[bytes]) -> Iterator[bytes]:
    """Yield the answers that fit into one message; the others are empty, and so count as none."""
    left_bytes = ANSWERS_BYTES_MAX
    for answer in answers:
        fits = len(answer) <= left_bytes
        left_bytes -= len(answer) if fits else 0
        yield answer if fits else b""
