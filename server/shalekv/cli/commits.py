"""What commands print of a write that the server has acknowledged."""

from __future__ import annotations

from shalekv.cli.console.output import Format, Record, print_line, print_record, printing
from shalekv_client import Commit


def print_commit(commit: Commit, output_format: Format | None) -> None:
    """The sequence number; with a format also where the commit is, and how durable."""
    with printing():
        if output_format is None:
            print_line(f"seq {commit.seq}")
        else:
            print_record(output_format, commit_record(commit))


def commit_record(commit: Commit) -> Record:
    """The parts of a commit that people ask for."""
    return {
        "seq": commit.seq,
        "wal_id": commit.wal_id,
        "epoch": commit.epoch,
        "durability": commit.durability.name.lower() if commit.durability else None,
    }
