"""The same toy job under Elastic, Ray Train elastic and torchft, and one driver that strikes all three in the same way."""
