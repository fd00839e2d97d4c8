"""Alignment: one group element per space that brings a model next to another without changing what it computes."""
