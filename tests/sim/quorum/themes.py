"""How often what happens in a simulated quorum: each run has a theme, so that faults meet."""

from __future__ import annotations

from collections.abc import Mapping

_ALWAYS: Mapping[str, float] = {
    "burst": 30,
    "write": 15,
    "arrive_late": 2,
    "work": 2,
    "connect": 1,
    "break_stream": 0.5,
    "crash": 0.5,
    "start": 6,
    "archive": 1,
    "trim": 1,
    "look_at_manifest": 1,
    "broadcast": 0.5,
    "stop_writer": 0.3,
    "fill_disk": 0.1,
}
_THEMES: Mapping[str, Mapping[str, float]] = {
    "rivals": {"open": 8, "stop_writer": 2, "archive": 0, "trim": 0, "work": 0},
    "disks": {"open": 8, "crash": 3, "stop_writer": 1.5, "archive": 0.3, "trim": 0.3},
    "damages": {"open": 3, "damage": 4, "wipe": 0.5, "crash": 2},
    "streams": {
        "open": 2,
        "connect": 10,
        "arrive_late": 15,
        "relay": 4,
        "broadcast": 4,
        "break_stream": 2,
    },
    "archive": {"open": 4, "archive": 6, "trim": 4, "archive_all": 3, "stop_writer": 1},
    "members": {"open": 3, "change_members": 8, "look_at_manifest": 3, "wipe": 1},
    "everything": {
        "open": 3,
        "crash": 2,
        "damage": 1,
        "wipe": 0.5,
        "arrive_late": 5,
        "connect": 3,
        "relay": 3,
        "archive": 4,
        "trim": 4,
        "archive_all": 0.5,
        "change_members": 2,
    },
}

# The weights of what may happen, by the name of the method of `World` without its underscore.
THEMES: Mapping[str, Mapping[str, float]] = {
    theme: {**_ALWAYS, **weights} for theme, weights in _THEMES.items()
}
