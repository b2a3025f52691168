"""Exit codes of the commands, and the mapping of errors to them.

An error becomes the exit code of the process in one of these places:

    cli.main.main                   commands that read or edit the object store
    cli.console.talking             commands that talk to a server; these also have `ClientExit`
    cli.load.run, cli.load.bulk     load, which also reports what is stored
    cli.process.lifecycle           serve, reader, safekeeper: `run_server` logs the error
    cli.process.databases           compactor, collector: `run_to_end` logs the error
    cli.process.shutdown            a second signal ends the process at once
    cli.console.lazy_commands       Ctrl-C in any other command: `INTERRUPTED`
    cli.console.output              standard output cannot be written: `OUTPUT`

A usage error of click is `USAGE`. A command whose result is a verdict, such as `fsck`, chooses the
code itself.
"""

from __future__ import annotations

import errno
from collections.abc import Mapping
from enum import IntEnum

from shalekv import errors


class ExitCode(IntEnum):
    """Exit codes of a process; scripts and supervisors may rely on the numbers."""

    OK = 0
    UNEXPECTED = 1
    USAGE = 2
    DATABASE_NOT_FOUND = 3
    FENCED = 4
    DAMAGED = 5
    STORE = 6
    ADDRESS_IN_USE = 7
    CONFLICT = 8
    OUTPUT = 12  # 9 to 11 belong to `ClientExit`
    NO_QUORUM = 13
    INTERRUPTED = 130
    TERMINATED = 143


MEANING: Mapping[ExitCode, str] = {
    ExitCode.OK: "done, or stopped as it was asked to",
    ExitCode.UNEXPECTED: "an error that none of the others describes",
    ExitCode.USAGE: "a flag, a variable, a setting or a URL is wrong; nothing was done",
    ExitCode.DATABASE_NOT_FOUND: "there is no database at the URL",
    ExitCode.FENCED: "another writer, or compactor, has taken over: do not start this one again",
    ExitCode.DAMAGED: "stored bytes are damaged, newer than this version, or against the protocol",
    ExitCode.STORE: "the object store does not answer, refuses, or cannot be written safely",
    ExitCode.ADDRESS_IN_USE: "another process listens on the address",
    ExitCode.CONFLICT: "others edited the manifest first: try again; a new start with --open-once "
    "takes over",
    ExitCode.OUTPUT: "standard output cannot be written",
    ExitCode.NO_QUORUM: "too few safekeepers answer, or they have lost records",
    ExitCode.INTERRUPTED: "ended at once by a second Ctrl-C",
    ExitCode.TERMINATED: "ended at once by a second SIGTERM",
}

# For an error of a class that is not in the table, its nearest base class that is decides.
_OF_ERROR: Mapping[type[errors.ShaleError], ExitCode] = {
    errors.ShaleError: ExitCode.UNEXPECTED,
    errors.InvalidRequest: ExitCode.USAGE,
    errors.InvalidUrl: ExitCode.USAGE,
    errors.InvalidSetting: ExitCode.USAGE,
    errors.DatabaseExists: ExitCode.USAGE,
    errors.DatabaseMismatch: ExitCode.USAGE,
    errors.DatabaseNotFound: ExitCode.DATABASE_NOT_FOUND,
    errors.Fenced: ExitCode.FENCED,
    errors.Superseded: ExitCode.FENCED,
    errors.Stopping: ExitCode.STORE,  # the store accepted nothing until the writer's grace ended
    errors.SnapshotNotFound: ExitCode.USAGE,
    errors.SnapshotExists: ExitCode.USAGE,
    errors.LeaseLost: ExitCode.CONFLICT,
    errors.BackupNotFound: ExitCode.USAGE,
    errors.BackupBusy: ExitCode.CONFLICT,
    errors.QuorumUnavailable: ExitCode.NO_QUORUM,
    errors.LogBehindArchive: ExitCode.NO_QUORUM,
    errors.NotAMember: ExitCode.NO_QUORUM,
    errors.LogDamaged: ExitCode.NO_QUORUM,
    errors.IllegalState: ExitCode.DAMAGED,
    errors.ImplausibleTime: ExitCode.STORE,
    errors.OriginLost: ExitCode.DAMAGED,
    errors.CorruptObject: ExitCode.DAMAGED,
    errors.ObjectNotFound: ExitCode.DAMAGED,
    errors.StoreError: ExitCode.STORE,
    errors.ManifestVersionExists: ExitCode.CONFLICT,
    errors.ManifestConflict: ExitCode.CONFLICT,
    errors.PolicyChanged: ExitCode.CONFLICT,
}


def exit_code_of(error: BaseException) -> ExitCode:
    """The exit code of a command ended by `error`.

    For an exception group it is the code of all its members, or `UNEXPECTED` if they differ.
    """
    if isinstance(error, OSError) and error.errno == errno.EADDRINUSE:
        return ExitCode.ADDRESS_IN_USE
    if isinstance(error, BaseExceptionGroup):
        codes = {exit_code_of(inner) for inner in error.exceptions}
        return codes.pop() if len(codes) == 1 else ExitCode.UNEXPECTED
    known = (_OF_ERROR[cls] for cls in type(error).__mro__ if cls in _OF_ERROR)
    return next(known, ExitCode.UNEXPECTED)


def exit_codes_text() -> str:
    """The table of exit codes as an epilog of a --help."""
    rows = [f"  {code.value:>3}  {meaning}" for code, meaning in MEANING.items()]
    return "\n".join(["\b", "Exit codes:", *rows])
