"""CHOOSES: who sits where, which microbatches each runs, where each slice comes from.  Pure, standard library only."""
