"""The module `tests.kit.processes.stalling` without a folder for what is deleted."""

from __future__ import annotations

import sys

from tests.kit.processes.stalling import main

if __name__ == "__main__":
    sys.argv.insert(2, "")
    main()
