"""READS samples: which samples make up a step (a pure function), and their tokens, read ahead of the step
that needs them.
"""
