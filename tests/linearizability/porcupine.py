"""Judgement by another's checker: Porcupine, in Go, with the model written a second time.

`porcupine/main.go` reads histories as lines of JSON and answers each with a verdict. It is built
when it is first needed, which takes Go.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from tests.linearizability.operations import (
    Action,
    Add,
    Call,
    Delete,
    Exists,
    Get,
    Put,
    Reply,
    Result,
    Seen,
    SeqIs,
    Test,
)

SOURCE = Path(__file__).with_name("porcupine")
PROGRAM = Path(__file__).parents[2] / ".cache" / "bin" / "shalekv-porcupine"
BUILD_S = 300
JUDGE_S = 600

VERDICTS = {"Ok": True, "Illegal": False, "Unknown": None}

Json = dict[str, Any]


def build() -> Path:
    """Build the program; Go itself checks whether it is up to date."""
    PROGRAM.parent.mkdir(parents=True, exist_ok=True)
    command = ["go", "build", "-buildvcs=false", "-o", str(PROGRAM), "."]
    built = subprocess.run(
        command,
        cwd=SOURCE,
        env=os.environ | {"GOWORK": "off"},
        capture_output=True,
        text=True,
        check=False,
        timeout=BUILD_S,
    )
    assert built.returncode == 0, f"$ {' '.join(command)}\n{built.stdout}{built.stderr}"
    return PROGRAM


def judge_all(program: Path, parts: Iterable[Sequence[Call]]) -> list[bool | None]:
    """Return for each part of a history whether it is linearizable; None: it has given up.

    Porcupine knows nothing of sequence numbers until the model refuses one, so that operations of
    unknown outcome cost it more than our own checker.
    """
    lines = [json.dumps(_part(part), separators=(",", ":")) for part in parts]
    ran = subprocess.run(
        [str(program)],
        input="\n".join(lines),
        capture_output=True,
        text=True,
        check=False,
        timeout=JUDGE_S,
    )
    assert ran.returncode == 0, ran.stderr
    verdicts = ran.stdout.split()
    assert len(verdicts) == len(lines), f"{len(verdicts)} verdicts for {len(lines)} histories"
    return [VERDICTS[verdict] for verdict in verdicts]


def _part(part: Sequence[Call]) -> Json:
    names = dict.fromkeys(key for call in part for key in call.operation.keys)
    index = {key: number for number, key in enumerate(names)}
    return {"keys": len(index), "calls": [_call(call, index) for call in part]}


def _call(call: Call, index: dict[bytes, int]) -> Json:
    operation = call.operation
    found: Json = {
        "client": call.client,
        "began": call.began,
        "tests": [_test(test, index) for test in operation.tests],
        "then": [_action(action, index) for action in operation.then],
        "refuses": operation.otherwise is None,
        "otherwise": [_action(action, index) for action in operation.otherwise or ()],
    }
    if call.reply is not None:
        found |= {"ended": call.ended, "reply": _reply(call.reply)}
    return found


def _test(test: Test, index: dict[bytes, int]) -> Json:
    key = index[test.key]
    match test:
        case Exists(_, wanted):
            return {"key": key, "kind": "exists", "wanted": wanted}
        case SeqIs(_, seq):
            return {"key": key, "kind": "seq", "seq": seq}
        case _:
            return {"key": key, "kind": "value", "value": test.value.hex()}


def _action(action: Action, index: dict[bytes, int]) -> Json:
    key = index[action.key]
    match action:
        case Get():
            return {"key": key, "kind": "get"}
        case Put(_, value):
            return {"key": key, "kind": "put", "value": value.hex()}
        case Delete():
            return {"key": key, "kind": "delete"}
        case Add(_, delta):
            return {"key": key, "kind": "add", "delta": delta}


def _reply(reply: Reply) -> Json:
    return {
        "succeeded": reply.succeeded,
        "notACounter": reply.not_a_counter,
        "results": [_result(result) for result in reply.results],
        "seq": reply.seq or 0,  # no commit has the number 0
        "foundSeq": -1 if reply.found_seq is None else reply.found_seq,
    }


def _result(result: Result) -> Json:
    match result:
        case Seen(value, seq):
            return {"found": True, "value": value.hex(), "seq": seq or 0}
        case int():
            return {"counter": result}
        case None:
            return {}
