"""Feed-forward units of several models become units of one: zipped by correlation, or matched by a Bayesian model."""
