"""Between models: the straight line, the barrier on it, the plane through three."""
