"""Which rank holds which experts, decided before training."""
