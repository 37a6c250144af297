"""Tests of elastic/plan."""
