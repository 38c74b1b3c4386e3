"""What moves of rows, and experts, cost on the running ranks; layers built for that alone."""
