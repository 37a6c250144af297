"""The parameters of a wrapped model: whole or split, gathered from members, or brought from the host."""
