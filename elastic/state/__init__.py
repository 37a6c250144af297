"""Moves bytes: shards, snapshots in host memory, and healing from members, hosts and the bucket.  It does not
use Ray.
"""
