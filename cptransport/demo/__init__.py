# SPDX-License-Identifier: Apache-2.0
"""The demo: a small hybrid KDA + Mamba2 language model, sharded, against itself unsharded.

``text`` packs documents, ``model`` is what a user would write, ``train`` is one rank's loop with the
comparison, ``launch`` starts ranks as processes or threads, ``report`` and ``plot`` show what came
out. The command is ``cptransport demo``.
"""

from __future__ import annotations

from cptransport.demo.launch import RankError, run_demo
from cptransport.demo.report import table
from cptransport.demo.train import LIMIT, Outcome, Settings, Step

__all__ = ["LIMIT", "Outcome", "RankError", "Settings", "Step", "run_demo", "table"]
