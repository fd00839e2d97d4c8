"""Merging: one output tensor at a time, streamed.

recipe/      what is to be merged, and how: read, validated once, walked in one place
plan/        what each output tensor is made of, from headers only
run/         the rows of the inputs, the jobs that merge them, threads and memory
outcome/     the merged model, what is written beside its weights, estimates
steps.py     from recipes to the merged model, in this order; api.py has the public functions
methods/     the merge methods; vocabulary/ matches the tokens of different tokenizers
"""
