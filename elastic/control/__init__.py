"""Control decides: facts and the time go in; a decision and the sentence that explains it come out.  No
clock, no randomness, no I/O.
"""
