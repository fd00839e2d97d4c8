"""Measuring models: on real data, against each other, and against what their files promise.

The package is callable: `isomerge.evaluate(model, data)` is `isomerge.evaluate.tasks.run.evaluate`.
"""

from isomerge.verbs import answers_calls

answers_calls(__name__, "isomerge.evaluate.tasks.run")
