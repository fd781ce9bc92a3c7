# SPDX-License-Identifier: Apache-2.0
"""Benchmarks: cases, timing, reports as JSON of one schema, and their rendering.

``cptransport bench CASE`` makes a document, ``cptransport report FILES --out DIR`` renders it. A
number exists only where the same configuration was found correct in the same process; whatever
failed stays in the document as a row that says why.
"""
