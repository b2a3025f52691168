"""All decoders. `tests.fuzz.test_registry` finds those that are not among them."""

from __future__ import annotations

from tests.fuzz.decoders import manifests, members, names_of_objects, pieces, ssts, texts

DECODERS = (
    *ssts.DECODERS,
    *pieces.DECODERS,
    *manifests.DECODERS,
    *members.DECODERS,
    *names_of_objects.DECODERS,
    *texts.DECODERS,
)
