"""`shalekv shell` at a terminal: a pseudo terminal, whose Ctrl-C is a signal."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path

from tests.kit.processes.in_process import memory_store, serving

# Copies between its own pipes and a pseudo terminal, in which the program runs.
TERMINAL = "import pty, sys; sys.exit(pty.spawn(sys.argv[1:]) >> 8)"
SHELL = str(Path(sys.executable).with_name("shalekv"))
CTRL_C, CTRL_D = "\x03", "\x04"


class Typing:
    """Types into a shell, and reads what it shows."""

    def __init__(self, address: str, state: Path) -> None:
        changed = {"SHALEKV_ADDR": address, "XDG_STATE_HOME": str(state)}
        changed |= {"TERM": "xterm", "PROMPT_TOOLKIT_NO_CPR": "1"}
        self.process = subprocess.Popen(
            [sys.executable, "-c", TERMINAL, SHELL, "shell"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | changed,
        )
        self.prompt = f"{address}>"
        self._shown = ""

    def type(self, text: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(text.encode())
        self.process.stdin.flush()

    def until(self, text: str) -> None:
        """Read until the shell has shown `text`."""
        assert self.process.stdout is not None
        while text not in self._shown:
            more = os.read(self.process.stdout.fileno(), 4_096)
            assert more, f"ended before it has shown {text!r}: {self._shown!r}"
            self._shown += more.decode(errors="replace")
        self._shown = self._shown.partition(text)[2]


async def test_ctrl_c_ends_what_runs_and_not_the_shell(tmp_path: Path) -> None:
    """A watch and a line that is typed end with Ctrl-C, the shell with Ctrl-D and exit code 0."""

    def work(address: str) -> int:
        shell = Typing(address, tmp_path)
        with shell.process:
            try:
                use(shell)
                return shell.process.wait()
            finally:
                shell.process.kill()

    def use(shell: Typing) -> None:
        shell.until(shell.prompt)
        shell.type("set kiwi green\r")
        shell.until("seq 1")
        shell.until(shell.prompt)
        shell.type("watch --from-seq 1\r")
        shell.until("put\tkiwi\tgreen")
        shell.type(CTRL_C)
        shell.until(shell.prompt)
        shell.type(f"del kiwi{CTRL_C}")
        shell.until(shell.prompt)
        shell.type("get kiwi\r")
        shell.until("green")
        shell.until(shell.prompt)
        shell.type(CTRL_D)

    async with serving(memory_store()) as served:
        assert await asyncio.to_thread(work, served.listen) == 0
    history = (tmp_path / "shalekv" / "shell_history").read_text()
    assert history.splitlines() == ["set kiwi green", "watch --from-seq 1", "get kiwi"]
