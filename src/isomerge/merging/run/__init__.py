"""Run: the rows of the inputs, the jobs that merge them, and the memory they take."""
