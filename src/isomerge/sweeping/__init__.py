"""Many values of a recipe's parameters, each merged in memory and measured; nothing is written for a point.

over ── ranges ──> points ── address ──> recipes ── merger, bench ──> one stock module ──> loss and metric
"""
