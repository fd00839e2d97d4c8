"""Which way of merging is best for these models: check, candidates, search, and a test beside the models alone."""
