"""The time that tests wait for what must come.  It measures no promise: a shared machine may be five times slower than a minute ago."""

PATIENCE_S = 300.0
"""Half of the time in seconds that pytest gives a whole test, so that the test that waits can say for what."""
