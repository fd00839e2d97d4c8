"""Fusing models by optimal transport: units of one model are carried to the units of another they are nearest to."""

from isomerge.merging.transport.api import fuse, transported

__all__ = ["fuse", "transported"]
