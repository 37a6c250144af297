"""Copies in host memory that outlive their workers: where they lie, who holds them, how they travel.  No Ray."""
