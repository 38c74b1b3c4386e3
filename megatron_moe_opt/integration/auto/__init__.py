"""Layers whose dispatcher is planned, tried and kept."""
