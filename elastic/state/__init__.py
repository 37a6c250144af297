"""Moves bytes: shards, snapshots in host memory, and healing from members, hosts and the bucket.  This
package does not use Ray.
"""
