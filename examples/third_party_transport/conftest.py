# SPDX-License-Identifier: Apache-2.0
"""Options, markers and the report of the contract suite."""

from __future__ import annotations

pytest_plugins = ["cptransport.testing.plugin"]
