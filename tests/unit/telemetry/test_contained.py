"""What records calls does not make them fail."""

from __future__ import annotations

from structlog.testing import capture_logs

from shalekv.telemetry.contained import contained


def test_a_bug_is_logged_once_in_a_while() -> None:
    """The first failure of a function has a line with its name; those that follow have none."""
    calls: list[int] = []

    @contained
    def record(number: int) -> None:
        calls.append(number)
        raise ZeroDivisionError

    with capture_logs() as logs:
        for number in range(3):
            record(number)
    assert calls == [0, 1, 2]
    (line,) = logs
    assert line["event"] == "telemetry has failed"
    assert line["what"].endswith("record")
    assert isinstance(line["exc_info"], ZeroDivisionError)
