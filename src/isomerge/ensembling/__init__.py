"""Several models that predict together: combinations, one object to run and to save, generation, and rankers.

models, folders of snapshots ── members ──> stock modules ── outputs ──> log-probabilities ── combinations ──> logits
"""
