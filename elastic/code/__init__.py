"""The code that a job names or is given: the objects, the files of which it is made, and their digests."""
