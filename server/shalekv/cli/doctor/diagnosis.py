"""Finding of a check: its severity, the evidence, and the command that helps.

`checked` runs a check, with a deadline.
"""

from __future__ import annotations

import asyncio
import enum
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass

from shalekv.errors import ShaleError
from shalekv.wording import counted
from shalekv_client import ShaleKVError

INSTALL_SERVER = "pip install 'shalekv[server]'"
NEEDS_SERVER = f"needs {INSTALL_SERVER}"


class Severity(enum.StrEnum):
    """How bad a finding is."""

    OK = "ok"
    WARNING = "warning"  # it works, and costs something, or may fail later
    PROBLEM = "problem"  # something does not work, or data are in danger
    UNCHECKED = "not checked"  # the evidence says why


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """The finding of one check."""

    area: str  # "machine", "store", "database", or "server HOST:PORT"
    check: str
    severity: Severity
    evidence: str  # one line, with figures
    fix: str = ""  # a command, or what to do; empty: nothing is to be done


@dataclass(frozen=True, slots=True)
class Area:
    """Makes the findings of one area."""

    name: str

    def ok(self, check: str, evidence: str) -> Diagnosis:
        """Return a finding that all is well."""
        return Diagnosis(self.name, check, Severity.OK, evidence)

    def warning(self, check: str, evidence: str, fix: str = "") -> Diagnosis:
        """Return a finding that is worth a look."""
        return Diagnosis(self.name, check, Severity.WARNING, evidence, fix)

    def problem(self, check: str, evidence: str, fix: str = "") -> Diagnosis:
        """Return a finding that must be fixed."""
        return Diagnosis(self.name, check, Severity.PROBLEM, evidence, fix)

    def unchecked(self, check: str, reason: str, fix: str = "") -> Diagnosis:
        """Return the reason why a check was not made."""
        return Diagnosis(self.name, check, Severity.UNCHECKED, reason, fix)


def summary(found: Iterable[Diagnosis]) -> str:
    """Return one line: ``1 problem, 2 warnings, 20 checks passed, 3 not checked``."""
    counts = Counter(each.severity for each in found)
    parts = [
        counted(counts[Severity.PROBLEM], "problem"),
        counted(counts[Severity.WARNING], "warning"),
        f"{counted(counts[Severity.OK], 'check')} passed",
    ]
    if counts[Severity.UNCHECKED]:
        parts.append(f"{counts[Severity.UNCHECKED]} not checked")
    return ", ".join(parts)


STORE = Area("store")
Work = Callable[[], Awaitable[Sequence[Diagnosis]]]


async def checked(
    area: Area, check: str, work: Work, timeout_ms: int, *, if_silent: str = ""
) -> list[Diagnosis]:
    """Return the findings of a check, or why there are none.

    With `if_silent`, that there is no answer in time is a problem, and this is what to do.
    """
    try:
        async with asyncio.timeout(timeout_ms / 1_000):
            return [*await work()]
    except TimeoutError:
        silence = f"no answer within {timeout_ms:,} ms (--timeout-ms)"
        if if_silent:
            return [area.problem(check, silence, if_silent)]
        return [area.unchecked(check, silence)]
    except (ShaleError, ShaleKVError) as error:
        return [area.unchecked(check, str(error))]
    except ModuleNotFoundError:
        return [area.unchecked(check, NEEDS_SERVER)]
    except OSError as error:
        return [area.unchecked(check, error.strerror or "the system refuses")]
    except Exception as error:  # noqa: BLE001 - the other checks go on, and its text may be a secret
        return [area.unchecked(check, f"the check itself failed: {type(error).__name__}")]
