"""The checks of machines with GPUs, and what watches commands there."""
