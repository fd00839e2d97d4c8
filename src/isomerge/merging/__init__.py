"""Merging: one output tensor at a time, streamed.

recipe/      what is to be merged, and how: read, validated once, walked in one place
plan/        what each output tensor is made of, from headers only
run/         the rows of the inputs, the jobs that merge them, threads and memory
outcome/     the merged model, what is written beside its weights, estimates
prepared_models.py   aligned, measured or run on data, before tensors are merged
merge_documents.py   from recipes to the merged model, in this order; api.py has the public functions
methods/     merge methods that see one tensor at a time; vocabulary/ matches the tokens of different tokenizers
data_methods/  merge methods that run whole models on data, with layerwise/ (solved layer by layer) and transport/
recipe_data.py, measured_statistics.py, moved_grams.py   data of a recipe, and what it shows of each model
aligned_tensors.py, repair.py   aligned inputs, and repair of what was merged
adapters.py, reproduce.py   merged adapters, a merge made again from its lock file
"""
