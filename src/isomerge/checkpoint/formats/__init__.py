"""Weights that other programs store in their own way, read as the tensors they stand for."""
