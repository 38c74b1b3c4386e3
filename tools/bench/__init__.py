"""What layers, kernels and choices take and hold, on this machine or on netbox's imitated nodes."""
