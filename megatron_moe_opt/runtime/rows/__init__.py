"""Rows on their way to experts and back, as one all-to-all or several collectives carry them."""
