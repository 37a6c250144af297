"""READS: which samples make up a step (pure), and their tokens, in time."""
