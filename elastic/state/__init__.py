"""MOVES BYTES: shards, snapshots in host memory, and healing from members, hosts and the bucket.  No Ray."""
