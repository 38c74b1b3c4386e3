"""The command line: `moe-opt`."""
