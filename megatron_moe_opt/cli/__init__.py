"""The command line: `moe-opt bench | doctor`."""
