"""What is remembered outside the processes: objects, manifests, shards, journal segments, token datasets.

Knows neither torch nor Ray: a tensor here is (dtype name, shape, bytes).
"""
