"""What are these models to each other, and how should they be merged? In seconds, from headers and samples.

The package is callable: `isomerge.check("model-a", "model-b")` is `isomerge.check.api.check`.
"""

from isomerge.verbs import answers_calls

answers_calls(__name__, "isomerge.check.api")
