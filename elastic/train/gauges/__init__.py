"""Gauges: what steps take and tell: progress, seconds, bytes, operations, profiles."""
