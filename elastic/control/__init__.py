"""DECIDES: facts and the time in, a decision and the sentence saying why out.  No clock, no randomness, no I/O."""
