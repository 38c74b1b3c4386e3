"""Rows on their way to experts and back."""
