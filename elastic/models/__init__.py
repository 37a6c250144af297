"""Models: plain modules for one device, each of which may declare a sharding table."""
