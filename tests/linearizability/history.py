"""Writes down what clients do, in one order of moments, and what they are told."""

from __future__ import annotations

from dataclasses import dataclass, replace

from tests.linearizability.operations import Call, Operation, Reply


@dataclass(frozen=True, slots=True)
class Ticket:
    """An operation that was begun."""

    number: int


class Recorder:
    """The history of one round. All clients share an event loop, so that moments can be counted."""

    def __init__(self) -> None:
        self._moments = 0
        self._calls: dict[int, Call] = {}

    def begin(self, client: int, operation: Operation) -> Ticket:
        moment = self._moment()
        self._calls[moment] = Call(client, operation, moment)
        return Ticket(moment)

    def answer(self, ticket: Ticket, reply: Reply) -> None:
        call = self._calls[ticket.number]
        self._calls[ticket.number] = replace(call, ended=self._moment(), reply=reply)

    def forget(self, ticket: Ticket) -> None:
        """It is certain that it had no effect, and nothing was shown: it tells nothing."""
        del self._calls[ticket.number]

    def history(self) -> list[Call]:
        """What was done and told; what was not answered has an unknown outcome.

        A read of which nothing is known tells nothing.
        """
        calls = self._calls.values()
        return [call for call in calls if call.reply is not None or not call.operation.is_read]

    def _moment(self) -> int:
        self._moments += 1
        return self._moments
