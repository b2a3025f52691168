"""All decoders, by group. `tests.fuzz.test_decoders` finds those that are not among them."""

from __future__ import annotations

from tests.fuzz.decoders import manifests, members, names_of_objects, pieces, ssts, texts

GROUPS = {
    "SSTs": ssts.DECODERS,
    "pieces of SSTs": pieces.DECODERS,
    "manifests": manifests.DECODERS,
    "members": members.DECODERS,
    "names": names_of_objects.DECODERS,
    "texts": texts.DECODERS,
}
DECODERS = tuple(each for group in GROUPS.values() for each in group)
