"""The places that a slice is read from while a world heals."""
