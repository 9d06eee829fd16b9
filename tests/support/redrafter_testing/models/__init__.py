"""Targets, adapters and drafters small enough to make in a test, and data to train on."""
