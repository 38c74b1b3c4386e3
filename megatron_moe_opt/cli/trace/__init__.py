"""Choices of experts, drawn or recorded, and what is learned from them: `moe-opt trace`."""
