"""What the planner expects of clusters and compositions that are not at hand; nothing is measured."""
