"""A run in one process, without Ray: its loop, its only member, and a second look at a checkpoint."""
