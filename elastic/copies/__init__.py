"""A worker's shard in host memory: copied there while it steps, held by its keeper and a buddy's, read again by those who heal.  No Ray."""
