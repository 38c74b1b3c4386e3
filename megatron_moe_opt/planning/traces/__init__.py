"""Which tokens went to which experts: recorded, generated, replayed."""
