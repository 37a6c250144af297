"""Schemes by which the gradients of the data ranks become one gradient."""
