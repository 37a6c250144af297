"""MODELS: plain modules for one device.  Each may declare a sharding table."""
