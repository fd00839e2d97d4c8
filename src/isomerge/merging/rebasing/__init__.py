"""A fine-tune carried to another base: the change moved by the alignment of the bases, and corrected on data."""
