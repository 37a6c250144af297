"""What happened, for people and for tests: pure functions of the journal."""
