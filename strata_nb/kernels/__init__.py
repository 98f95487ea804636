"""Compute: the numpy oracle of every kernel."""
