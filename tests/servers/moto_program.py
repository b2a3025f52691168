"""moto's server, one request at a time: by itself it checks and then writes, and races break
conditions.

Run as a program it serves on a free port, and prints that port.
"""

from __future__ import annotations

import importlib
import io
import threading
from collections.abc import Callable, Iterable
from typing import Any

Environment = dict[str, Any]
Application = Callable[[Environment, Any], Iterable[bytes]]


def one_at_a_time(application: Application) -> Application:
    """`application`, which is given each request whole, and no two at once."""
    turn = threading.Lock()

    def serve(environment: Environment, start: Any) -> Iterable[bytes]:
        body = _body(environment)
        environment |= {"wsgi.input": io.BytesIO(body), "CONTENT_LENGTH": str(len(body))}
        with turn:
            return list(application(environment, start))

    return serve


def _body(environment: Environment) -> bytes:
    size = environment.get("CONTENT_LENGTH")
    if size:
        return bytes(environment["wsgi.input"].read(int(size)))
    is_chunked = environment.get("wsgi.input_terminated", False)
    return bytes(environment["wsgi.input"].read()) if is_chunked else b""


def main() -> None:
    # Imported by name, since the type checker would otherwise read all of moto.
    moto: Any = importlib.import_module("moto.server")
    serving: Any = importlib.import_module("werkzeug.serving")
    application = moto.DomainDispatcherApplication(moto.create_backend_app)
    server = serving.make_server("127.0.0.1", 0, one_at_a_time(application), threaded=True)
    print(f"listens on {server.port}", flush=True)  # noqa: T201 - this is how it tells
    server.serve_forever()


if __name__ == "__main__":
    main()
