"""Many values of a recipe's parameters, each merged in memory and measured; nothing is written for a point.

    over ── ranges ──> points ── address ──> recipes ── merging, module ──> one stock module ──> loss and metric

The package is callable: `isomerge.sweep("recipe.yml", {"t": "0:1:0.1"}, data=…)` is `isomerge.sweep.api.sweep`.
"""

from isomerge.verbs import answers_calls

answers_calls(__name__, "isomerge.sweep.api")
