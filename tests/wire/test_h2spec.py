"""h2spec, the conformance suite of HTTP/2, finds nothing at our server."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree as ET

from tests.kit.processes.processes import Processes
from tests.servers.obtain import obtained
from tests.wire.interop.service import served

CASES = 146


async def test_h2spec_passes(processes: Processes, tmp_path: Path) -> None:
    """All cases pass in strict mode, also those that look at the reply to a plain GET."""
    program, report = obtained("h2spec") / "bin" / "h2spec", tmp_path / "report.xml"
    async with served() as address:
        port = address.rpartition(":")[2]
        flags = ["--strict", "--port", port, "--junit-report", str(report)]
        ran = await processes.run(*flags, program=str(program))
    cases = ET.parse(report).getroot().findall(".//testcase")  # noqa: S314 - we wrote it
    other = [f"{each.get('package')}: {each.get('classname')}" for each in cases if len(each)]
    assert other == [], ran.report()
    assert len(cases) == CASES
