"""Reading the user's batches and objectives: tensors, lists of samples, terms, denominators."""
