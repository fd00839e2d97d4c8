"""Merging: one output tensor at a time, streamed.

The package is callable: `isomerge.merge([…])` is `isomerge.merge.api.merge`.
"""

from isomerge.verbs import answers_calls

answers_calls(__name__, "isomerge.merge.api")
