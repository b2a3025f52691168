"""`shalekv completion`: print a script for the completion of commands and options in a shell."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

from shalekv.cli.console.exit_codes import ExitCode
from shalekv.cli.console.output import print_line, printing

PROGRAM = "shalekv"
COMPLETE_VARIABLE = "_SHALEKV_COMPLETE"  # set by the script, read by click
SHELLS = ("bash", "zsh", "fish")

_HELP = """Print a script with which SHELL (bash, zsh, fish) completes commands and options.

\b
Examples:
  shalekv completion bash > ~/.local/share/bash-completion/completions/shalekv
  shalekv completion zsh > "${fpath[1]}/_shalekv"        then: compinit
  shalekv completion fish > ~/.config/fish/completions/shalekv.fish
  eval "$(shalekv completion bash)"                      for this terminal alone
"""


def _exit_codes() -> str:
    return "\n".join(["\b", "Exit codes:", f"  {ExitCode.OK:>3}  done"])


@click.command(help=_HELP, epilog=_exit_codes())
@click.argument("shell", type=click.Choice(SHELLS))
@click.pass_context
def completion(context: click.Context, *, shell: str) -> None:
    """Print the script."""
    kind = get_completion_class(shell)
    assert kind is not None  # click knows all of SHELLS
    script = kind(context.find_root().command, {}, PROGRAM, COMPLETE_VARIABLE)
    with printing():
        print_line(script.source_template % script.source_vars())
