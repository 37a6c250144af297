"""Optimizers and learning rate schedules.  ``base.py`` is what they have in common; each optimizer is one file beside it."""
