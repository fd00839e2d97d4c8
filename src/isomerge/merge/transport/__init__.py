"""Fusing models by optimal transport: units of one model are carried to the units of another they are nearest to."""

from isomerge.merge.transport.api import fuse, transported

__all__ = ["fuse", "transported"]
