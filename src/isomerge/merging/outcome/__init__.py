"""Outcome: the merged model, what is written beside its weights, and estimates."""
