"""The worker's own program: state, one step, the loop that lives through worlds, healing, saving.  No Ray."""
