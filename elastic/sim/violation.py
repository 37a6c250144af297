"""The error for a broken promise."""

from __future__ import annotations


class Violation(AssertionError):
    """A promise was broken.  ``simulate`` adds seed, time and the end of the story."""
