"""COMPUTES: process groups, sharded models, reductions of gradients, optimizers.  Uses torch, never Ray."""
