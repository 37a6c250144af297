"""Kernels: how single operations are computed, and the choice among several ways.  They know tensors only."""
