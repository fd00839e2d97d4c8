"""Optimal transport: units of one model are carried to the units of another they are nearest to."""
