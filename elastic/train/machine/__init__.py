"""What this machine offers a worker: memory and network interfaces."""
