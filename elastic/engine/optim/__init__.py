"""Optimizers and learning rate schedules.  ``base.py`` has what all optimizers share; each optimizer is one file beside it."""
