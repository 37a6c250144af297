"""CONFIGURATION: a TOML file, a command line or Python becomes checked values."""
