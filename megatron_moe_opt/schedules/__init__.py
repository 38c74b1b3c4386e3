"""Schedules: what runs in which lane and waits for what, as data. One builder a system."""
