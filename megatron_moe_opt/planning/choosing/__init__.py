"""Which of what is predicted, or tried, is run."""
