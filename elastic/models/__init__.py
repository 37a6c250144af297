"""Plain modules for one device; each may declare its sharding table."""
