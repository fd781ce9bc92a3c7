# SPDX-License-Identifier: Apache-2.0
"""Seams into what users already run; each module says which library and which of its versions."""
