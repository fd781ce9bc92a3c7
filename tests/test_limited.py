# SPDX-License-Identifier: Apache-2.0
"""Calls with a limit: answers, errors, calls that hang, and the end of a process that gave one up."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest

from cptransport.limited import LimitedCalls


def test_an_answer_and_an_error_come_back() -> None:
    calls = LimitedCalls("test")
    assert calls(lambda: None, 5.0) == (None,)
    with pytest.raises(KeyError, match="words"):
        calls(lambda: {}["words"], 5.0)
    assert calls(threading.current_thread, 5.0) != (threading.current_thread(),)


def test_no_call_is_made_while_one_before_hangs() -> None:
    calls, goes_on, made = LimitedCalls("test"), threading.Event(), []
    assert calls(goes_on.wait, 0.05) == ()
    assert calls(lambda: made.append(1), 5.0, patience_s=0.05) == ()
    threading.Timer(0.2, goes_on.set).start()
    assert calls(lambda: made.append(2), 5.0, patience_s=5.0) == (None,)
    assert made == [2]


@pytest.mark.parametrize(("answers_after_s", "words"), [(0.5, b"answered"), (60.0, b"")])
def test_a_process_ends_after_an_answer_but_not_never(answers_after_s: float, words: bytes) -> None:
    program = (
        "import sys, time\n"
        "from cptransport.limited import LimitedCalls\n"
        "def call():\n"
        f"    time.sleep({answers_after_s})\n"
        "    sys.stdout.write('answered')\n"
        "    sys.stdout.flush()\n"
        "assert LimitedCalls('test')(call, 0.01) == ()\n"
    )
    ran = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, timeout=30, check=True
    )
    assert ran.stdout == words
