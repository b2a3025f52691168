"""Whatever a decoder is given, it ends in a documented error or in the right answer, and soon.

Three kinds of bytes: arbitrary ones; encodings that something has happened to; and those of a
forger, who makes the checksums match again.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.fuzz.decoders.decoder import Decoder, check_cost, is_refused, outcome
from tests.fuzz.decoders.registry import DECODERS
from tests.fuzz.mutations import absurd_numbers, flipped, mutants, overwritten

ARBITRARY_MAX_BYTES = 400
PLACES_MAX = 60  # of a sample, at which absurd numbers are put in turn
SMALL_BYTES = 5_000
EXAMPLES, EXAMPLES_OF_COST = 60, 12
EXAMPLES_OF_SOAK, EXAMPLES_OF_COST_OF_SOAK = 1_500, 150

# `make test` fuzzes the same examples every time; `make soak` draws new ones. A property takes as
# long as it takes: a busy machine is no counterexample.
NEW_EXAMPLES = settings(
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
SAME_EXAMPLES = settings(NEW_EXAMPLES, derandomize=True)

decoders = pytest.mark.parametrize("decoder", DECODERS, ids=str)


def arbitrary(_decoder: Decoder) -> st.SearchStrategy[bytes]:
    """Bytes from nowhere."""
    return st.binary(max_size=ARBITRARY_MAX_BYTES)


def changed(decoder: Decoder) -> st.SearchStrategy[bytes]:
    """Encodings that something has happened to."""
    return mutants(decoder.samples)


def forged(decoder: Decoder) -> st.SearchStrategy[bytes]:
    """The same with checksums that match."""
    return changed(decoder).map(decoder.reseal or bytes)


def check(decoder: Decoder, data: bytes) -> None:
    """Any answer will do."""
    outcome(decoder, data)


def check_changed(decoder: Decoder, data: bytes) -> None:
    """Where a checksum covers all there is one right answer."""
    found = outcome(decoder, data)
    if decoder.is_sealed and not is_refused(decoder, found):
        assert found in [decoder.decode(sample) for sample in decoder.samples], "a wrong answer"


KINDS = {
    "arbitrary": (arbitrary, check),
    "changed": (changed, check_changed),
    "forged": (forged, check),
}
kinds = pytest.mark.parametrize("kind", KINDS)


def fuzz(
    decoder: Decoder,
    kind: str,
    how: settings,
    check_: Callable[[Decoder, bytes], None] | None = None,
) -> None:
    """Give the decoder bytes of this kind."""
    make, check_kind = KINDS[kind]
    judge = check_ or check_kind

    @how
    @given(make(decoder))
    def attack(data: bytes) -> None:
        judge(decoder, data)

    attack()


@decoders
def test_samples_are_decoded(decoder: Decoder) -> None:
    """What the other tests begin with is taken, and stays as it is when it is sealed anew."""
    for sample in decoder.samples:
        found = outcome(decoder, sample)
        assert not is_refused(decoder, found), found
        assert found == decoder.decode(sample)
        assert (decoder.reseal or bytes)(sample) == sample


@pytest.mark.parametrize("decoder", [each for each in DECODERS if each.found], ids=str)
def test_what_was_found_once(decoder: Decoder) -> None:
    """What ended in another error, or could, ends in a documented one, or is what it says."""
    for data in decoder.found:
        check_changed(decoder, data)
        if len(data) < SMALL_BYTES:
            check_cost(decoder, data)


@kinds
@decoders
def test_fuzzed(decoder: Decoder, kind: str) -> None:
    """Bytes of each kind end in a documented error, or in an answer; with a checksum, the right."""
    fuzz(decoder, kind, settings(SAME_EXAMPLES, max_examples=EXAMPLES))


@pytest.mark.parametrize("kind", ["arbitrary", "forged"])
@decoders
def test_costs_are_bounded(decoder: Decoder, kind: str) -> None:
    """Memory and work are bounded by what there is to decode, whatever it claims to be."""
    fuzz(decoder, kind, settings(SAME_EXAMPLES, max_examples=EXAMPLES_OF_COST), check_cost)


@decoders
def test_absurd_numbers(decoder: Decoder) -> None:
    """A length, a count or an offset of any size in any place costs nothing, and ends as above."""
    sample = min(decoder.samples, key=len)
    step = max(1, min(len(sample), SMALL_BYTES) // PLACES_MAX)
    for at in range(0, min(len(sample), SMALL_BYTES), step):
        for number, new in enumerate(absurd_numbers()):
            data = (decoder.reseal or bytes)(overwritten(sample, at, new))
            if (at // step + number) % 8:
                check(decoder, data)
            else:
                check_cost(decoder, data)


@decoders
def test_flipped_bits_and_cuts(decoder: Decoder) -> None:
    """One bit of each byte of the smallest sample, and every length of it."""
    sample = min(decoder.samples, key=len)
    for at in range(min(len(sample), SMALL_BYTES)):
        check_changed(decoder, flipped(sample, 8 * at + at % 8))
        check_changed(decoder, sample[:at])
        check_changed(decoder, sample[at:])


@pytest.mark.parametrize(
    "decoder", [each for each in DECODERS if each.encodings is not None], ids=str
)
def test_round_trips(decoder: Decoder) -> None:
    """What was encoded is what is decoded."""
    round_trip(decoder, settings(SAME_EXAMPLES, max_examples=EXAMPLES))


def round_trip(decoder: Decoder, how: settings) -> None:
    """Encode values of all kinds, and decode them."""
    assert decoder.encodings is not None

    @how
    @given(decoder.encodings)
    def attack(encoding: tuple[bytes, object]) -> None:
        data, value = encoding
        assert decoder.decode(data) == value

    attack()


@pytest.mark.soak
@pytest.mark.timeout(900)
@kinds
@decoders
def test_fuzzed_at_length(decoder: Decoder, kind: str) -> None:
    """The same with new examples each time, and with more of them."""
    fuzz(decoder, kind, settings(NEW_EXAMPLES, max_examples=EXAMPLES_OF_SOAK))
    fuzz(decoder, kind, settings(NEW_EXAMPLES, max_examples=EXAMPLES_OF_COST_OF_SOAK), check_cost)
    if decoder.encodings is not None:
        round_trip(decoder, settings(NEW_EXAMPLES, max_examples=EXAMPLES_OF_COST_OF_SOAK))
