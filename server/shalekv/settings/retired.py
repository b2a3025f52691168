"""Settings of the previous release that do not exist any more, by their keys in a file.

A configuration that still has one is refused with this advice, for one release: then its entry goes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

# Old key -> new key.
RENAMED: Mapping[str, str] = {}

# Old key -> the reason, or what decides now.
REMOVED: Mapping[str, str] = {
    "collector.fence_age_s": "fences are never deleted any more, since a writer that was stalled "
    "for longer than their age lost acknowledged writes",
}


def retirement(given: str, form: Callable[[str], str]) -> str:
    """What became of the setting `given`; empty if it is not retired.

    `form` maps a key such as ``writer.flush_bytes`` to its name in the source of `given`.
    """
    for key, new_key in RENAMED.items():
        if form(key) == given:
            return f"was renamed to {form(new_key)}"
    for key, reason in REMOVED.items():
        if form(key) == given:
            return f"was removed: {reason}"
    return ""
