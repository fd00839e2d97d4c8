"""Between models: the straight line, the barrier on it, the plane through three."""

from isomerge.connect.barrier import barrier
from isomerge.connect.plane import plane

__all__ = ["barrier", "plane"]
