"""Compute: the numpy reference of every kernel."""
