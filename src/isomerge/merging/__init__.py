"""Merging: one output tensor at a time, streamed."""
