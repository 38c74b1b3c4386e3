"""Partitions of rows through their experts as one pipeline."""
