"""Measures what grows with the number of workers: each module has one ``measure(n)``, which runs the
product's own code for n workers.
"""
