"""Choices of experts, seeded or recorded, and what is learned from recorded ones."""
