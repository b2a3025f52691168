"""`shalekv fsck`: check every object of a database, read from the object store."""

from __future__ import annotations

import sys
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager

import click

from shalekv.cli.console.bucket import read_store, url_option
from shalekv.cli.console.exit_codes import ExitCode, exit_codes_text
from shalekv.cli.console.output import (
    Format,
    format_option,
    print_json,
    print_line,
    print_rows,
    printing,
)
from shalekv.cli.console.units import size
from shalekv.jobs.fsck.check import DEFAULT_PARALLEL, Fsck
from shalekv.jobs.fsck.objects import CheckProgress
from shalekv.protocol.audit import Finding, FindingKind
from shalekv.store.cas import CasStore
from shalekv.wording import counted

PARALLEL_MAX = 64
COLUMNS = ("object", "offset", "kind", "problem")

_HELP = """Check every object of a database, read from the object store without a server.

All reachable objects are read completely: the current manifest and those of snapshots, the WAL from
the last compacted object on, the SSTs of the levels and of loads. Checksums, the order and the
ranges of keys and sequence numbers, counts and sizes must match what other objects say; the
sequences of slots, levels and manifests must follow the protocol. Servers may run meanwhile.

Each line is a finding: the object, the byte offset, the kind, and the problem. An orphan is an
object in levels/ that nothing refers to: the collector deletes it. A clone_pin is a snapshot that
keeps SSTs for a clone which is gone, or cannot be reached from here; the finding has the command
that removes it. Neither changes the exit code.

\b
Examples:
  shalekv fsck --url file:///var/lib/shalekv
  shalekv fsck --url file:///var/lib/shalekv --deep     also compares the versions of all keys
  shalekv fsck --url file:///var/lib/shalekv --format json | jq .object
"""


@click.command(help=_HELP, epilog=exit_codes_text())
@url_option
@click.option(
    "--parallel",
    type=click.IntRange(1, PARALLEL_MAX),
    default=DEFAULT_PARALLEL,
    show_default=True,
    metavar="N",
    help="Number of objects to read at once. Each takes a few megabytes of memory.",
)
@click.option(
    "--deep",
    is_flag=True,
    help="Merge all keys, and check that no version hides a newer one.",
)
@format_option
def fsck(*, url: str, parallel: int, deep: bool, output_format: Format) -> None:
    """Check, print findings, and exit with a code that reports damage."""
    kinds: set[FindingKind] = set()
    with printing():
        progress = read_store(url, _checked(parallel, output_format, kinds, is_deep=deep))
    click.echo(_summary(progress, kinds), err=True)
    if any(kind.is_damage for kind in kinds):
        raise SystemExit(ExitCode.DAMAGED)
    if FindingKind.UNREADABLE in kinds:
        raise SystemExit(ExitCode.STORE)


def _checked(
    parallel: int, output_format: Format, kinds: set[FindingKind], *, is_deep: bool
) -> Callable[[CasStore], Awaitable[CheckProgress]]:
    """Return a check that prints findings, adds their kinds to `kinds`, and returns progress."""

    async def check(store: CasStore) -> CheckProgress:
        fsck = Fsck(store, parallel=parallel, is_deep=is_deep)
        rows: list[tuple[str, int | None, str, str]] = []  # of a table, printed at the end
        with _check_progress(fsck.progress):
            async for finding in fsck.findings():
                kinds.add(finding.kind)
                if output_format is Format.TABLE:
                    rows.append(_row(finding))
                else:
                    _print(finding, output_format)
        if rows:
            print_rows(output_format, COLUMNS, rows)
        return fsck.progress

    return check


def _row(finding: Finding) -> tuple[str, int | None, str, str]:
    return (finding.name, finding.offset, finding.kind.value, finding.problem)


def _print(finding: Finding, output_format: Format) -> None:
    if output_format is Format.JSON:
        print_json(dict(zip(COLUMNS, _row(finding), strict=True)))
        return
    print_line("\t".join("" if cell is None else str(cell) for cell in _row(finding)))


@contextmanager
def _check_progress(progress: CheckProgress) -> Iterator[None]:
    """Show the progress on a terminal."""
    if not sys.stderr.isatty():
        yield
        return
    from shalekv.cli.console.progress import checking_bar  # noqa: PLC0415 - 60 ms, only for terminals

    with checking_bar(progress):
        yield


def _summary(progress: CheckProgress, kinds: set[FindingKind]) -> str:
    """Format the verdict, and the number of objects checked."""
    checked = (
        f"{counted(progress.manifests, 'manifest')}, "
        f"{counted(progress.wal_objects, 'WAL object')} ({counted(progress.fences, 'fence')}), "
        f"{counted(progress.ssts, 'SST')}, {size(progress.size_bytes)}"
    )
    if any(kind.is_damage for kind in kinds):
        return f"damaged: {checked}"
    if FindingKind.UNREADABLE in kinds:
        return f"not everything could be read: {checked}"
    orphans = "; orphans wait for the collector" if FindingKind.ORPHAN in kinds else ""
    pins = (
        "; SSTs are kept for clones that were not found" if FindingKind.CLONE_PIN in kinds else ""
    )
    return f"clean: {checked}{orphans}{pins}"
