# SPDX-License-Identifier: Apache-2.0
"""``python -m cptransport`` is the ``cptransport`` command."""

from __future__ import annotations

import sys

from cptransport.cli import main

if __name__ == "__main__":
    sys.exit(main())
