# SPDX-License-Identifier: Apache-2.0
"""The built-in transports: ``loopback`` (one rank), ``threads`` (N ranks in one process), ``gloo`` (processes)."""
