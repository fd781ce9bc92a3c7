# SPDX-License-Identifier: Apache-2.0
"""The SSD engine compiled for sm_90 on a machine without a GPU, as ``without_gpu`` does for KDA.

A script, since Triton reads at import whether to interpret. It prints one JSON document::

    kernels     name -> bytes of shared memory, of all that was compiled
    launches    name -> number, in a fold, a forward and a backward of a rank inside a chain with a gate
    handles     per launch whether Triton itself would have launched the same compiled kernel
"""

from __future__ import annotations

import json
from collections import Counter

import torch
import without_gpu
from ssd_chain import Rank

import cptransport.engines.triton.ssd as triton_ssd
from cptransport.engines import LocalSegment, Need
from cptransport_kernels.fold import FoldSteps
from cptransport_kernels.ssd_fold import ssd_fold

TOKENS = 1000


def main() -> None:
    """Run everything and print what was found."""
    without_gpu.driver.set_active(without_gpu._Driver())
    triton_ssd.ssd_piece_tokens = lambda *_: 512
    sizes = {"heads": 4, "groups": 2, "headdim": 64, "dstate": 128, "gated": True}
    segments = [LocalSegment(0, TOKENS, 0, False, False)]
    rank = Rank(segments, TOKENS, dtype=torch.bfloat16, **sizes)
    need = Need(True, True)

    steps = FoldSteps([[(0, 0, -1, -1), (1, 0, 0, -1)]], "cpu")
    addresses = torch.zeros(2, dtype=torch.int64)

    def run() -> None:
        ssd_fold(steps, addresses, addresses, batch=1, out=rank.table)
        rank.backward(rank.forward(need), need)

    run()
    without_gpu.launches.clear()
    run()
    launches = Counter(without_gpu.launches)
    handles = without_gpu.compare_handles(run)
    found = {"kernels": without_gpu.kernels, "launches": launches, "handles": handles}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
