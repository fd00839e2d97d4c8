"""Between models: the straight line, the barrier on it, the plane through three."""

from isomerge.connectivity.barrier import barrier
from isomerge.connectivity.plane import plane

__all__ = ["barrier", "plane"]
