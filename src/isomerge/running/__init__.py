"""One way to run a model: load its stock class, pass over data, leave padding out, watch activations, sum them up."""
