# SPDX-License-Identifier: Apache-2.0
"""Becomes a rank: ``python rank.py NAME=VALUE ... -- COMMAND ...`` sets the variables and runs the command.

torchrun gives all ranks the environment it was started with; what differs by rank is set here, after
it. ``{rank}`` in a value stands for the rank.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Replace this process by the command."""
    end = sys.argv.index("--")
    for setting in sys.argv[1:end]:
        name, _, value = setting.partition("=")
        os.environ[name] = value.replace("{rank}", os.environ["RANK"])
    if sys.platform == "linux":
        # A launcher that was killed cannot end its ranks, and MPS does not end before they do.
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM), 0, 0, 0)
    command = sys.argv[end + 1 :]
    os.execv(command[0], command)


if __name__ == "__main__":
    main()
