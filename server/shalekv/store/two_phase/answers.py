"""What the error of a transactional store says about the request that it answers."""

from __future__ import annotations

import enum


class Answer(enum.Enum):
    """What became of a statement."""

    UNKNOWN = "nobody knows"
    NOT_DONE = "not carried out; the next time it may be"
    REFUSED = "not carried out, and it will not be"
    CONFLICT = "not carried out: the key is there"
