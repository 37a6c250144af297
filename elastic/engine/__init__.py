"""COMPUTES: process groups, sharded models, reductions of gradients, optimizers.  It uses torch, and never
Ray.
"""
