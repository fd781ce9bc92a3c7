# SPDX-License-Identifier: Apache-2.0
"""The contract suite as a package for ``pytest --pyargs cptransport.testing.suite``."""
