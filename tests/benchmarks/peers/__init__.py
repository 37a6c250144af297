"""Elastic, Ray Train elastic and torchft run one toy job, and one driver strikes all three in the same way."""
