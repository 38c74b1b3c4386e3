"""What the papers say in closed form, in their own symbols: tests hold the planner against it."""
