"""The worker's own program: its state, one step, and the loop that lives through worlds.  It does not use
Ray.
"""
