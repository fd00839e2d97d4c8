"""Many values of a recipe's parameters, each merged in memory and measured; nothing is written for a point.

over ── ranges ──> points ── address ──> recipes ── merging, module ──> one stock module ──> loss and metric
"""
