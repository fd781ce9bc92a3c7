# SPDX-License-Identifier: Apache-2.0
"""Triton kernels for boundary state: a leaf that knows tensors and integers, no process group.

Importing this package loads nothing; each kernel module imports Triton itself.
"""
