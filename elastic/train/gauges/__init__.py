"""Measures steps and reports on them: progress, seconds, bytes, operations, profiles."""
