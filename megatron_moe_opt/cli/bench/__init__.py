"""Benchmarks, each against stock Megatron-Core in the same run: `moe-opt bench`."""
