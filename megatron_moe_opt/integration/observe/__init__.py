"""What layers do, reported."""
