"""Decoders end any input in a documented error or in the right answer, and soon.

There are three kinds of input: arbitrary bytes; changed encodings; and those of a forger, who makes
the checksums match again. A failure prints how to repeat it.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from random import Random

import pytest

from tests.fuzz.budget import attempts, budgets, replayable
from tests.fuzz.decoders import credentials, manifests, members, pieces, ssts, texts
from tests.fuzz.decoders.decoder import Decoder, check_cost, is_refused, outcome
from tests.fuzz.mutations import ABSURD_NUMBERS, flipped, mutant, overwritten
from tests.style.sources import ROOT

GROUPS = {
    "SSTs": ssts.DECODERS,
    "pieces of SSTs": pieces.DECODERS,
    "manifests": manifests.DECODERS,
    "members": members.DECODERS,
    "names": texts.NAMES,
    "texts": texts.DECODERS,
    "credentials": credentials.DECODERS,
}
DECODERS = tuple(each for group in GROUPS.values() for each in group)
BUDGET_S = 0.8  # of a group
ARBITRARY_BYTES_MAX = 400
SMALL_BYTES = 5_000
groups = pytest.mark.parametrize("group", GROUPS)

FORMAT = "shalekv.format."
FOLDERS = ("server/shalekv", "clients/python/shalekv_client", "clients/python/shalekv_wire")
GENERATED = "shalekv.v1."
# A decoder by its name everywhere; in the format of objects by more names.
DECODES = re.compile(r"(decode|parse)(_\w+)?")
READS = re.compile(r"(open|read|records)_\w+|plain|unseal|\w+_of|needed_\w+|told_\w+|is_backup_\w+")
# Functions with such a name that decode nothing, or nothing from outside.
NO_DECODERS = {
    "shalekv.format.block_frame.codec_of": "looks at a block that `plain` has taken",
    "shalekv.format.columns.columns_of": "is given entries, not bytes",
    "shalekv.format.footer.checksum_of": "looks at a footer that was just made",
    "shalekv.format.wal_record.header_of": "encodes",
    "shalekv.telemetry.profile._Taken.decode": "is told by a process of the same server",
    # tests/wire/test_hostile_bytes.py gives random and changed frames to whole connections.
    "shalekv_wire.frames.parse_goaway": "is tested with its connection",
    "shalekv_wire.frames.parse_settings": "is tested with its connection",
    "shalekv_wire.frames.parse_word": "is tested with its connection",
}


def check_changed(decoder: Decoder, data: bytes) -> None:
    """Check that changed data has the one right answer, if a checksum covers all of it."""
    found = outcome(decoder, data)
    if decoder.is_sealed and not is_refused(decoder, found):
        assert found in [decoder.decode(sample) for sample in decoder.samples], "a wrong answer"


def attack(decoder: Decoder, random: Random) -> None:
    """Give a decoder bytes of some kind, and watch what it answers, or what that costs."""
    reseal = decoder.reseal or bytes
    match random.randrange(8):
        case 0:
            outcome(decoder, random.randbytes(random.randrange(ARBITRARY_BYTES_MAX)))
        case 1 | 2:
            check_changed(decoder, mutant(random, decoder.samples))
        case 3 | 4:
            outcome(decoder, reseal(mutant(random, decoder.samples)))
        case 5:
            sample = random.choice(decoder.samples)
            at = random.randrange(len(sample))
            outcome(decoder, reseal(overwritten(sample, at, random.choice(ABSURD_NUMBERS))))
        case 6:
            sample = random.choice(decoder.samples)
            at = random.randrange(len(sample))
            for data in (flipped(sample, 8 * at + at % 8), sample[:at], sample[at:]):
                check_changed(decoder, data)
        case _:
            check_cost(decoder, reseal(mutant(random, decoder.samples)))


@budgets
@groups
def test_fuzzed(group: str, times: int) -> None:
    """Any bytes end in a documented error, or in an answer; with a checksum, in the right one.
    Memory and work are bounded by the size of the input, whatever it claims.
    """
    for number, random in attempts(group, times * BUDGET_S):
        with replayable(number):
            attack(GROUPS[group][number % len(GROUPS[group])], random)


@pytest.mark.parametrize("decoder", DECODERS, ids=str)
def test_samples_are_decoded(decoder: Decoder) -> None:
    """The samples of the attacks are decoded, and unchanged when sealed again; inputs that once
    failed, or could, end in a documented error, or are decoded.
    """
    for sample in decoder.samples:
        found = outcome(decoder, sample)
        assert not is_refused(decoder, found), found
        assert found == decoder.decode(sample)
        assert (decoder.reseal or bytes)(sample) == sample
    for data in decoder.found:
        check_changed(decoder, data)
        if len(data) < SMALL_BYTES:
            check_cost(decoder, data)


def functions() -> Iterator[tuple[str, ast.FunctionDef]]:
    """Return all public functions and class methods, by the names that importers know."""
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            module = ".".join(path.relative_to((ROOT / folder).parent).with_suffix("").parts)
            if module.startswith(GENERATED):
                continue
            for node in ast.parse(path.read_text()).body:
                if isinstance(node, ast.FunctionDef):
                    yield f"{module}.{node.name}", node
                elif isinstance(node, ast.ClassDef):
                    yield from _class_methods(f"{module}.{node.name}", node)


def _class_methods(place: str, node: ast.ClassDef) -> Iterator[tuple[str, ast.FunctionDef]]:
    for method in node.body:
        if not isinstance(method, ast.FunctionDef):
            continue
        if "classmethod" in map(ast.unparse, method.decorator_list):
            yield f"{place}.{method.name}", method


def looks_like_a_decoder(place: str, node: ast.FunctionDef) -> bool:
    """Return whether it is a decoder, by its name or by the type of its argument."""
    if DECODES.fullmatch(node.name):
        return True
    if not place.startswith(FORMAT) or node.name.startswith("_"):
        return False
    given = [ast.unparse(each.annotation) for each in node.args.args if each.annotation]
    return READS.fullmatch(node.name) is not None or any("wire." in each for each in given)


def test_every_decoder_is_fuzzed() -> None:
    """A new one is missed here, until it is registered, with a name of its own."""
    covers = {cover for decoder in DECODERS for cover in decoder.covers}
    covered = {f"{cover.__module__}.{cover.__qualname__}" for cover in covers}
    found = {place for place, node in functions() if looks_like_a_decoder(place, node)}
    assert found - covered == {*NO_DECODERS}
    names = [decoder.name for decoder in DECODERS]
    assert len({*names}) == len(names)
