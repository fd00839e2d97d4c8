"""Alignment: one group element per space that brings a model next to another without changing what it computes.

The package is callable: `isomerge.align(source, anchor=…)` is `isomerge.align.api.align`.
"""

from isomerge.verbs import answers_calls

answers_calls(__name__, "isomerge.align.api")
