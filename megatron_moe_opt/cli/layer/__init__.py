"""One MoE layer on the ranks of this run, as benchmarks build, time and predict it."""
