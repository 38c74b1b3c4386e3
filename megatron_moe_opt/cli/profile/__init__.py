"""Measurements of this cluster: `moe-opt profile`."""
