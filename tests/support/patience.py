"""How long tests wait for what must come.  No promise is measured by it: a shared machine may be five times slower than a minute ago."""

PATIENCE_S = 300.0
"""Half of what pytest gives a whole test, so that who waits can say for what."""
