"""The command `shalekv`: a table of commands, each imported when it is called.

So `shalekv get` loads what the light client needs and nothing of the server, and starts fast.
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Mapping
from types import MappingProxyType

try:
    import click
except ModuleNotFoundError:
    sys.exit("Error: click is not installed. Install ShaleKV and its packages: pip install shalekv")

from shalekv.cli.console.exit_codes import ExitCode, exit_code_of
from shalekv.cli.console.lazy_commands import CommandTable, LazyCommands
from shalekv.errors import ShaleError
from shalekv.version import VERSION

# Without this, gRPC prepares for a fork whenever this process starts another one, and breaks the
# calls that are under way. The processes that we start run other programs: no preparation is
# needed.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")

COMMANDS: CommandTable = {
    "serve": ("shalekv.cli.commands.serve:serve", "Serve a database to gRPC clients."),
    "reader": ("shalekv.cli.commands.reader:reader", "Serve reads of a database, as a replica."),
    "safekeeper": (
        "shalekv.cli.commands.safekeeper:safekeeper",
        "Hold write-ahead logs of databases.",
    ),
    "get": ("shalekv.cli.commands.get:get", "Print the value of a key."),
    "exists": ("shalekv.cli.commands.exists:exists", "Print which keys have a value."),
    "count": ("shalekv.cli.commands.count:count", "Count the keys of a range."),
    "put": ("shalekv.cli.commands.put:put", "Set the value of a key."),
    "delete": ("shalekv.cli.commands.delete:delete", "Delete a key, or a range of keys."),
    "add": ("shalekv.cli.commands.add:add", "Add to a counter."),
    "ttl": ("shalekv.cli.commands.ttl:ttl", "Print how long a key lives until it expires."),
    "touch": ("shalekv.cli.commands.touch:touch", "Change when a key expires."),
    "txn": ("shalekv.cli.commands.txn:txn", "Run a transaction: compare keys, then write."),
    "scan": ("shalekv.cli.commands.scan:scan", "Print keys and values in key order."),
    "load": ("shalekv.cli.commands.load:load", "Put every pair of a file, in batches."),
    "dump": ("shalekv.cli.commands.dump:dump", "Write one state of all pairs into a file."),
    "watch": ("shalekv.cli.commands.watch:watch", "Print commits to a range as they happen."),
    "shell": ("shalekv.cli.commands.shell:shell", "Open a prompt on one connection."),
    "status": ("shalekv.cli.commands.status:status", "Print the status of a server."),
    "top": ("shalekv.cli.commands.top:top", "Show the load of servers, refreshed periodically."),
    "admin": (
        "shalekv.cli.commands.admin:admin",
        "Count requests and their cost; repair a store.",
    ),
    "health": (
        "shalekv.cli.commands.health:health",
        "Check whether a server is ready, by exit code.",
    ),
    "doctor": (
        "shalekv.cli.commands.doctor:doctor",
        "Check machine, store, database and servers; say what to do.",
    ),
    "bench": (
        "shalekv.cli.commands.bench:bench",
        "Measure a server: operations per second, latencies.",
    ),
    "access": (
        "shalekv.cli.commands.access:access",
        "Enforce the access policy; show who you are; recover.",
    ),
    "role": ("shalekv.cli.commands.role:role", "List, set and remove roles."),
    "grant": ("shalekv.cli.commands.grant:grant", "Give roles and quotas to principals."),
    "compactor": ("shalekv.cli.commands.compactor:compactor", "Merge the WAL and the levels."),
    "collector": ("shalekv.cli.commands.collector:collector", "Delete objects no longer needed."),
    "snapshot": (
        "shalekv.cli.commands.snapshot:snapshot",
        "Create, list, renew, share, delete snapshots.",
    ),
    "consumers": (
        "shalekv.cli.commands.consumers:consumers",
        "List and delete consumers of the WAL.",
    ),
    "backup": (
        "shalekv.cli.commands.backup:backup",
        "Copy a database into another store; list, check.",
    ),
    "restore": ("shalekv.cli.commands.restore:restore", "Create a database from a backup."),
    "clone": (
        "shalekv.cli.commands.clone:clone",
        "Create a database that shares SSTs with another.",
    ),
    "drop": (
        "shalekv.cli.commands.drop:drop",
        "Delete a database, and what keeps data for it.",
    ),
    "manifest": (
        "shalekv.cli.commands.manifest:manifest",
        "Print a manifest, read from the store.",
    ),
    "wal": ("shalekv.cli.commands.wal:wal", "List the WAL objects, read from the store."),
    "levels": (
        "shalekv.cli.commands.levels:levels",
        "Print the contents of each level, read from the store.",
    ),
    "sst": ("shalekv.cli.commands.sst:sst", "Inspect one SST of the WAL or the levels."),
    "fsck": ("shalekv.cli.commands.fsck:fsck", "Check every object of a database."),
    "store": ("shalekv.cli.commands.store:store", "Test whether a store can hold a database."),
    "compaction": (
        "shalekv.cli.commands.compaction:compaction",
        "Simulate compaction with other settings.",
    ),
    "token": (
        "shalekv.cli.commands.token:token",
        "Create, list and remove tokens of clients.",
    ),
    "tls": ("shalekv.cli.commands.tls:tls", "Create certificates for trials."),
    "completion": (
        "shalekv.cli.commands.completion:completion",
        "Print a completion script for your shell.",
    ),
}

# What users of similar products type, and what it is called here.
WORDS: Mapping[str, str] = MappingProxyType(
    {
        "set": "put KEY VALUE",
        "insert": "put KEY VALUE",
        "write": "put KEY VALUE",
        "setex": "put KEY VALUE --ttl 10s",
        "setnx": "put KEY VALUE --if-absent",
        "read": "get KEY",
        "cat": "get KEY",
        "del": "delete KEY",
        "rm": "delete KEY",
        "remove": "delete KEY",
        "unlink": "delete KEY",
        "flushall": "delete --all --yes",
        "flushdb": "delete --all --yes",
        "keys": "scan --keys-only",
        "list": "scan --keys-only",
        "ls": "scan --keys-only",
        "range": "scan --start KEY --end KEY",
        "dbsize": "count",
        "len": "count",
        "incr": "add KEY",
        "incrby": "add KEY 2",
        "decr": "add KEY -1",
        "expire": "touch KEY --ttl 10s",
        "pexpire": "touch KEY --ttl 10ms",
        "persist": "touch KEY --ttl never",
        "pttl": "ttl KEY",
        "lease": "put KEY VALUE --ttl 10s",
        "multi": "txn",
        "subscribe": "watch PREFIX",
        "info": "status",
        "endpoint": "status",
        "ping": "health",
        "import": "load FILE",
        "export": "dump FILE",
        "start": "serve --create --url file:///tmp/trial",
        "server": "serve --create --url file:///tmp/trial",
        "cli": "shell",
        "console": "shell",
        "repl": "shell",
        "version": "--version",
        "help": "--help",
    }
)
OPTIONS: Mapping[str, str] = MappingProxyType(
    {
        "--host": "--addr HOST:PORT",
        "--port": "--addr HOST:PORT",
        "--endpoint": "--addr HOST:PORT",
        "--endpoints": "--addr HOST:PORT",
        "--ex": "--ttl 10s",
        "--px": "--ttl 10ms",
        "--lease": "--ttl 10s",
        "--nx": "--if-absent",
        "--xx": "--if-present",
        "--from-key": "--start KEY",
        "--consistency": "--read-level linearizable",
        "--cacert": "--tls-ca FILE",
        "--cert": "--tls-cert FILE",
        "--password": "--token-file FILE",
        "--token": "--token-file FILE",
        "--json": "--format json",
        "--output": "--format json",
        "--write-out": "--format json",
    }
)

_HELP = """A durable key-value server whose only disk is an object store.

\b
Start with:
  shalekv serve --create --url file:///tmp/trial
and read on with:
  shalekv COMMAND --help
"""


@click.group(
    cls=LazyCommands,
    table=COMMANDS,
    words=WORDS,
    options=OPTIONS,
    help=_HELP,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog="The --help of a command explains its exit codes.",
)
@click.version_option(VERSION, prog_name="shalekv")
def shalekv() -> None:
    """Hold the commands of ShaleKV."""


def main() -> None:
    """Run the command that the arguments of this process name, and exit with its code."""
    # The core of gRPC writes to stderr, in no log format of ours; it reads this when imported.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    gc.disable()  # until the command is imported: it took a quarter of the start of a server
    try:
        shalekv(prog_name="shalekv")
    except ModuleNotFoundError as missing:
        if (missing.name or "").startswith("shalekv"):
            raise
        _fail(
            f"this command needs packages that are not installed, such as {missing.name}. "
            "Install them: pip install 'shalekv[server]'",
            ExitCode.USAGE,
        )
    except ShaleError as error:
        _fail(str(error), exit_code_of(error))
    finally:
        gc.freeze()  # all that is left ends with the process: no search for garbage before


def _fail(message: str, code: ExitCode) -> None:
    click.echo(f"Error: {message}", err=True)
    raise SystemExit(code)


if __name__ == "__main__":
    main()
