# SPDX-License-Identifier: Apache-2.0
"""What the suite counts as growth of a process: memory that is in use, not what malloc keeps for threads."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

_THREADS, _MIB = 12, 6

#: Threads that each free a block of some MiB, as a library's threads do, in arenas of their own.
_PROGRAM = f"""
import ctypes, sys, threading
from cptransport.testing.contract_lifetime import _give_back_what_is_freed, _handles

libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p

def block(size, together=None):
    address = ctypes.c_void_p(libc.malloc(ctypes.c_size_t(size)))
    ctypes.memset(address, 1, size)
    if together is not None:
        together.wait()
    if sys.argv[2] == "free":
        libc.free(address)

block({_MIB} << 21)  # once freed, smaller ones come from arenas
if sys.argv[1] == "given back":
    _give_back_what_is_freed()
before = _handles()["resident bytes"]
together = threading.Barrier({_THREADS})
threads = [
    threading.Thread(target=block, args=({_MIB} << 20, together)) for _ in range({_THREADS})
]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print((_handles()["resident bytes"] - before) >> 20)
"""


def _grown_mib(*arguments: str) -> int:
    command = [sys.executable, "-c", _PROGRAM, *arguments]
    return int(subprocess.run(command, capture_output=True, check=True, timeout=120).stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="about glibc's malloc")
def test_what_malloc_keeps_for_threads_is_no_growth_but_what_they_keep_is() -> None:
    assert _grown_mib("given back", "free") < _MIB
    assert _grown_mib("given back", "keep") >= _THREADS * _MIB
    assert _grown_mib("as it is", "free") > _THREADS * _MIB // 2  # else the suite needs not care
