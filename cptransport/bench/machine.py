# SPDX-License-Identifier: Apache-2.0
"""Where and with what a benchmark ran: the blocks ``machine``, ``software`` and ``git`` of a document.

Nothing here fails: what cannot be found out is None. Hosts are named by a hash only.
"""

from __future__ import annotations

import hashlib
import os
import platform
import re
import shutil
import socket
import subprocess
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import torch

from cptransport.registry import BACKENDS_GROUP
from cptransport.versions import versions

__all__ = ["git_state", "machine", "sm_mhz", "software"]


def _output(*command: str, directory: Path | None = None) -> str | None:
    """Return what a command printed, or None if it is absent or failed."""
    if shutil.which(command[0]) is None:
        return None
    try:
        done = subprocess.run(
            command, cwd=directory, capture_output=True, text=True, timeout=20, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def git_state() -> dict[str, Any]:
    """Return commit and dirtiness of the checkout that this package is in; None each outside one."""
    here = Path(__file__).resolve().parent
    commit = _output("git", "rev-parse", "HEAD", directory=here)
    tracked = _output("git", "ls-files", "--error-unmatch", __file__, directory=here)
    if commit is None or tracked is None:  # installed somewhere inside another project's checkout
        return {"commit": None, "dirty": None}
    changed = _output("git", "status", "--porcelain", "--untracked-files=no", directory=here)
    return {"commit": commit, "dirty": None if changed is None else bool(changed)}


def software() -> dict[str, Any]:
    """Return versions of all that takes part, and of every distribution that registers a backend."""
    found = versions()
    frontend, python_bindings = found.pop("cudnn_frontend"), found.pop("nvshmem4py")
    cudnn = [found["cudnn"], frontend and f"frontend {frontend}"]
    return {
        **found,
        "cudnn": ", ".join(part for part in cudnn if part) or None,
        "nvshmem": found["nvshmem"] or python_bindings,
        "backends": _backends(),
    }


def _backends() -> dict[str, str]:
    return {
        found.metadata["Name"]: found.version
        for found in distributions()
        if any(entry.group == BACKENDS_GROUP for entry in found.entry_points)
    }


def machine(*, device: str, world_size: int, gpus_used: int) -> dict[str, Any]:
    """Return the machine block as far as it is known before the run; clocks are read now.

    Args:
        device: ``"cpu"`` or ``"cuda"``.
        world_size: the largest number of ranks that ran here.
        gpus_used: how many GPUs they had; a CPU run has one device, the host.
    """
    devices = gpus_used if device == "cuda" else 1
    return {
        "gpu_name": torch.cuda.get_device_name() if device == "cuda" else None,
        "gpu_count": torch.cuda.device_count(),
        "gpus_used": gpus_used,
        "ranks_per_device": -(-world_size // devices),
        "interconnect": _interconnect(gpus_used),
        "driver": _smi("driver_version"),
        "cpu": _cpu(),
        "cpu_cores": _cores(),
        "hostname_hash": hashlib.sha256(socket.gethostname().encode()).hexdigest()[:12],
        "clocks": {"sm_mhz_before": sm_mhz(), "sm_mhz_after": None},
        "shared_node": _shared(),
    }


def sm_mhz() -> int | None:
    """Return the first GPU's clock."""
    clock = _smi("clocks.sm")
    found = re.match(r"\d+", clock or "")
    return int(found.group()) if found else None


def _smi(field: str) -> str | None:
    shown = _output("nvidia-smi", f"--query-gpu={field}", "--format=csv,noheader")
    return shown.splitlines()[0].strip() if shown else None


def _interconnect(gpus_used: int) -> str:
    if gpus_used == 0:
        return "host memory"
    if gpus_used == 1:
        return "none (one GPU)"
    shown = _output("nvidia-smi", "topo", "-m") or ""
    links = re.search(r"^GPU0\s+X\s+(\S+)", re.sub(r"\x1b\[[0-9;]*m", "", shown), re.MULTILINE)
    return links.group(1) if links else "unknown"


def _cpu() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        text = ""
    found = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    return found.group(1) if found else platform.processor() or platform.machine() or "unknown"


def _cores() -> int:
    """Cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _shared() -> bool:
    """Whether others were seen to use the machine: work before ours began, or a part of the cores only."""
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    return load > 0.5 or _cores() < (os.cpu_count() or 1)
