"""Measuring models: on real data, against each other, and against what their files promise."""
