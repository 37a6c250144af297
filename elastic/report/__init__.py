"""TELLS people and tests what happened, by pure functions of the journal."""
