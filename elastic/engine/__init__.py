"""COMPUTES: worlds, sharded models, the ordered fold, the optimizer.  torch, no Ray."""
