"""What was measured, as tables, charts, a page, and timelines."""
