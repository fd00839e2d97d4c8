"""The demo: small models trained on the spot on real data, aligned, averaged and measured.

The package is callable: `isomerge.demo(out)` is `isomerge.demo.run.demo`.
"""

from isomerge.verbs import answers_calls

answers_calls(__name__, "isomerge.demo.run")
