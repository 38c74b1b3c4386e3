"""Predictions for a cluster that need not be at hand: `moe-opt plan`."""
