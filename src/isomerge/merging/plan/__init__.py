"""Plan: what each tensor of the output is made of, from headers only."""
