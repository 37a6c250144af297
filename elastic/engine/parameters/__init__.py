"""One module for each parallel axis: how it rewrites the modules of a model."""
