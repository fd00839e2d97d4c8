"""Models that are found again: what a model was trained on, described beside it, and the one that suits a question."""
