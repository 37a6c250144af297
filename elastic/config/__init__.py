"""Configuration: a TOML file, a command line or Python values become checked settings."""
