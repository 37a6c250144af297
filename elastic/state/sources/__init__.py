"""Reads slices from the keepers' copies; ``heal.py`` reads from members and the bucket."""
