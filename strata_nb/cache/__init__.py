"""Decide where experts and K/V live: one ledger a device, and what it gives memory to."""
