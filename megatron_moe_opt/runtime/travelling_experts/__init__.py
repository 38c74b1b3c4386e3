"""Experts on their way to other ranks, and their gradients back."""
