"""One MoE layer on the ranks of this run under several dispatchers: `moe-opt bench`."""
