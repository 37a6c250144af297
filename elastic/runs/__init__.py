"""A run in its bucket: what it is, where it begins, its branches and forks, what it keeps, and its
metrics.
"""
