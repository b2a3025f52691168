"""Every worked example, step and rule of the seeds has its scenario files.

A place is a chapter of a seed, as its heading stands there; what it has to show stands behind it.
Places that have nothing to play are left out: other designs that were rejected, sizes, formats.
"""

from __future__ import annotations

from itertools import chain
from pathlib import Path

import pytest

from tests.scenarios.reading import scenarios_in

HERE = Path(__file__).parent
OF_SEEDS = "0*.txt"

# By the number of the seed. 004 tells the same as 000.
PLACES = {
    "000 CAS on S3: pattern 5, two-phase write": ["000_two_phase_writes"],
    "000 Two-Phase CAS Protocol, Writes: the steps": ["000_two_phase_writes"],
    "000 Two-Phase CAS Protocol, Writes: step 1": ["000_two_phase_step_1"],
    "000 Two-Phase CAS Protocol, Writes: step 2": ["000_two_phase_step_2"],
    "000 Two-Phase CAS Protocol, Writes: step 3": ["000_two_phase_step_3"],
    "000 Two-Phase CAS Protocol, Writes: step 4": ["000_two_phase_step_4"],
    "000 Two-Phase CAS Protocol, Writes: step 5": ["000_two_phase_step_5"],
    "000 Two-Phase CAS Protocol, Deletes": ["000_two_phase_deletes"],
    "000 Two-Phase CAS Protocol, Recovery": ["000_two_phase_recovery"],
    "000 File Structure: the listing": ["000_file_structure"],
    "000 Manifest Updates: the steps, the occasions": ["000_manifest_updates"],
    "000 Snapshots: creation, renewal, expiry, sharing": ["000_snapshots", "000_reader_snapshot"],
    "000 Writers, Writer Protocol: the steps": ["000_writer_protocol"],
    "000 Writers, Examples: the first, outcome 1": ["000_writer_protocol_example_1"],
    "000 Writers, Examples: the second, outcome 2": ["000_writer_protocol_example_2"],
    "000 Writers, Examples: the third, outcome 4": ["000_writer_protocol_example_3"],
    "000 Writers, Writer Protocol: outcome 3": ["000_writer_protocol_outcome_3"],
    "000 Writers, Acknowledgements": ["000_acknowledgements"],
    "000 Writers, Parallel Writes: 2 writers": ["000_parallel_writes_2_writers"],
    "000 Writers, Parallel Writes: 3 writers": ["000_parallel_writes_3_writers"],
    "000 Readers, Reader Protocol": ["000_reader_protocol", "000_reader_snapshot"],
    "000 Readers, Parallel Writes: the gap": ["000_reader_gap"],
    "000 Compactors": ["000_compactor"],
    "000 Garbage Collectors, Object Deletion: rule 1": ["000_collection_rule_1"],
    "000 Garbage Collectors, Object Deletion: rule 2": ["000_collection_rule_2"],
    "000 Garbage Collectors, Object Deletion: rule 3": ["000_collection_rule_3"],
    "000 Garbage Collectors, Object Deletion: rule 4": ["000_collection_rule_4"],
    "000 Garbage Collectors, Object Deletion: rule 5": ["000_collection_rule_5"],
    "000 Garbage Collectors, Transactional Store Deletion": ["000_transactional_deletion"],
    "001 Primary node Normal operation": ["quorum/001_normal_operation"],
    "001 Primary Crash recovery": ["quorum/001_crash_recovery"],
    "001 Built-in Paxos": ["quorum/001_builtin_paxos"],
    "003 Manifest Files: the listing": ["003_manifest_updates"],
    "003 Manifest Updates: the occasions": ["003_manifest_updates"],
    "003 Fencing Strategy: three instances": ["003_fencing_strategy"],
    "003 Manifest Update Protocol: the steps": ["003_manifest_update_protocol"],
    "003 Fencing and Compaction, which it leaves open": ["003_manifest_updates", "000_compactor"],
    "003 How a reader knows of new keys": ["003_reader_of_new_keys"],
}

# The rules that the design adds, and where they are played.
RULES = {
    "F1": ["protocol_f1", "protocol_f1_collector", "000_collection_rule_3"],
    "F2": ["protocol_f2"],
    "F3": ["protocol_f3", "000_collection_rule_5"],
}


@pytest.mark.parametrize(("place", "files"), {**PLACES, **RULES}.items(), ids=[*PLACES, *RULES])
def test_each_place_has_its_scenarios(place: str, files: list[str]) -> None:
    """Its files are there, each holds a scenario, and says at its head which place it is about."""
    for name in files:
        path = HERE / f"{name}.txt"
        assert path.exists(), f"{place} is played nowhere"
        assert [s for s in scenarios_in(path.parent) if s.file == path.name]
        head = path.read_text("utf-8").partition("scenario: ")[0]
        assert head.startswith("# "), f"{name} does not say what it is about"


def test_each_file_of_a_seed_is_at_a_place() -> None:
    """No file of a seed is left out of the table above."""
    found = {path.relative_to(HERE).with_suffix("").as_posix() for path in HERE.rglob(OF_SEEDS)}
    assert found == {*chain.from_iterable(PLACES.values())}


@pytest.mark.parametrize("path", sorted(HERE.glob(OF_SEEDS)), ids=lambda path: path.stem)
def test_each_file_of_a_seed_names_its_seed(path: Path) -> None:
    """Whoever has the seeds open beside it finds the chapter: the first line names it."""
    first = path.read_text("utf-8").splitlines()[0]
    assert first.startswith(f'# Seed {path.name[:3]}, "')
