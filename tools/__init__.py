"""What a checkout has besides the package: measurements and checks for those who work on it."""
