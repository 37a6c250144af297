"""Finds the memory and the network interfaces that this machine offers a worker."""
