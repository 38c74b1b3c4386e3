"""What ops cost on a cluster: measured, described or known."""
