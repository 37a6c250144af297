"""Tests of elastic/data and storage/datasets."""
