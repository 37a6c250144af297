"""The places from which slices are read while a world heals."""
