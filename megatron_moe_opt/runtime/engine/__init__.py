"""Schedules run: ops, lanes, collectives, and the clocks beside them."""
