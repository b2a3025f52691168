"""Writes the bytes of golden files whose descriptions are there: `python -m ... tests/golden/v2`.

For each JSON file in the folder that has no bytes yet, an SST, a manifest or an access policy is
written beside it, and the description is completed. Files that exist are never overwritten: when a
format gets more to say, add a set and keep the older ones, which prove that what was written then
can still be read.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from shalekv.format.access import encode_policy
from shalekv.format.manifest import encode_manifest
from shalekv.format.sst import open_sst
from shalekv.format.sst_writer import encode_sst
from tests.golden.descriptions import (
    ARGUMENTS,
    Json,
    arguments_in,
    control_in,
    describe_manifest,
    describe_policy,
    describe_sst,
    entries_in,
    ids_in,
    manifest_in,
    policy_in,
    properties_in,
    range_tombstones_in,
    system_in,
)

SUFFIXES = {"manifest": ".manifest", "policy": ".policy"}


def sst_of(description: Json) -> tuple[bytes, Json]:
    """The bytes of the SST that is described, and what they say."""
    data = encode_sst(
        properties_in(description),
        entries_in(description),
        range_tombstones_in(description),
        system_in(description),
        control_in(description),
        **arguments_in(description),
    )
    sst = open_sst(properties_in(description).name, data, database_id=None)
    arguments = {name: description[name] for name in ARGUMENTS if name in description}
    return data, describe_sst(sst, arguments)


def make(folder: Path) -> None:
    for path in sorted(folder.glob("*.json")):
        kind = path.stem.partition("_")[0]
        target = path.with_suffix(SUFFIXES.get(kind, ".sst"))
        if target.exists():
            continue
        description: Json = json.loads(path.read_text("ascii"))
        if kind == "manifest":
            manifest = manifest_in(description)
            data, described = encode_manifest(manifest), describe_manifest(manifest)
        elif kind == "policy":
            policy, ids = policy_in(description), ids_in(description)
            data, described = encode_policy(policy, **ids), describe_policy(policy, **ids)
        else:
            data, described = sst_of(description)
        target.write_bytes(data)
        path.write_text(json.dumps(described, indent=1) + "\n", "ascii")


if __name__ == "__main__":
    make(Path(sys.argv[1]))
