"""Feed-forward units of several models become the units of one: zipped by correlation, or matched by a Bayesian model."""
