"""Checks a job, the model, the loss, the data and the bucket, before a run and before its first step."""
