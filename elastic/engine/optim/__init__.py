"""Optimizers and learning rate schedules.  ``base.py`` has what all optimizers share; each optimizer is one
file beside it.

``owners.py`` lets them compute with whole matrices, and ``rounding.py`` keep moments in bfloat16.
"""
