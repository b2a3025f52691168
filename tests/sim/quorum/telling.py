"""Events of a simulated quorum, to be read by people."""

from __future__ import annotations

import enum
from dataclasses import fields, is_dataclass

from shalekv.core.quorum.record import Ballot, LogShape, Mark, Record


def told(part: object) -> str:
    """A part of an event, briefly."""
    match part:
        case Mark():
            return f"{part.epoch}.{part.lsn}"
        case LogShape():
            runs = (f"{first}-{last.lsn} of epoch {last.epoch}" for first, last in part.sections)
            return f"[behind {told(part.base)}: {', '.join(runs)}]"
        case Record():
            return f"{part.lsn}:{part.payload.decode()}"
        case Ballot():
            return f"{part.epoch}/{part.nonce.decode().lstrip('0')}"
        case tuple():
            return f"({' '.join(map(told, part))})"
        case bytes():
            return part.decode(errors="replace").lstrip("0")
        case enum.Enum():
            return str(part.value)
        case _ if is_dataclass(part) and not isinstance(part, type):
            values = (f"{each.name}={told(getattr(part, each.name))}" for each in fields(part))
            return f"{type(part).__name__}({', '.join(values)})"
    return str(part)
