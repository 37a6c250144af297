"""Storage: everything that outlives the processes.  Objects, checkpoints, the journal and token datasets are
a room each.

This package imports neither torch nor Ray.  A tensor here is the name of its dtype, its shape and its bytes.
"""
