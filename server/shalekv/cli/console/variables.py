"""Names of variables in the environment, and of keys in [client] of a file.

Those of settings follow from their models. These are of commands that talk to a server, and are
here because such a command does not load the models.
"""

from __future__ import annotations

PREFIX = "SHALEKV_"
CONFIG_VARIABLE = f"{PREFIX}CONFIG"
URL_VARIABLE = f"{PREFIX}DATABASE__URL"  # as for `shalekv serve`
ADDRESS_VARIABLE = f"{PREFIX}ADDR"
TOKEN_VARIABLE = f"{PREFIX}TOKEN"
TRACEPARENT_VARIABLE = "TRACEPARENT"  # not ours: the environment of W3C Trace Context
WIRE_VARIABLE = f"{PREFIX}CLIENT_WIRE"  # the client has it as well: loading that takes long

CLIENT = "client"  # the table of a file
CLIENT_KEYS = ("tls_ca", "tls_cert", "tls_key", "tls_server_name", "token_file", "insecure_token")


def variable_of_client(key: str) -> str:
    """Return the variable that has the value of a key of [client]."""
    return f"{PREFIX}{key.upper()}"


CLIENT_VARIABLES = frozenset(
    [ADDRESS_VARIABLE, TOKEN_VARIABLE, WIRE_VARIABLE, *map(variable_of_client, CLIENT_KEYS)]
)
