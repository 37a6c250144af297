"""Tests.  A package, so that helpers are imported by their full name: ``from tests.support.processes import
...``.
"""
