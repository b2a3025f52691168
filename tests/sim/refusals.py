"""The outside world, refused: every method of an event loop that would leave the simulation."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, NoReturn

from tests.sim.errors import NotSimulated

_REFUSED = (
    # names and connections
    "getaddrinfo getnameinfo create_connection create_server create_unix_connection "
    "create_unix_server create_datagram_endpoint connect_accepted_socket start_tls sendfile "
    # sockets, files and pipes
    "add_reader remove_reader add_writer remove_writer connect_read_pipe connect_write_pipe "
    "sock_accept sock_connect sock_recv sock_recv_into sock_recvfrom sock_recvfrom_into "
    "sock_sendall sock_sendfile sock_sendto "
    # threads, processes and signals
    "run_in_executor set_default_executor shutdown_default_executor subprocess_exec "
    "subprocess_shell add_signal_handler remove_signal_handler "
    # what would replace parts of the simulation
    "set_task_factory set_exception_handler"
).split()


class IsolatedLoop(asyncio.BaseEventLoop):
    """An event loop without an outside world: each of its doors raises `NotSimulated`.

    The refusal comes from the call itself, before anything is awaited.
    """


def _refusal(name: str) -> Callable[..., NoReturn]:
    def refuse(_loop: IsolatedLoop, *_args: Any, **_kwargs: Any) -> NoReturn:
        raise NotSimulated(name)

    refuse.__name__ = name
    refuse.__qualname__ = f"IsolatedLoop.{name}"
    return refuse


for _name in _REFUSED:
    setattr(IsolatedLoop, _name, _refusal(_name))
