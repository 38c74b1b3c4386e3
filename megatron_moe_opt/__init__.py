"""Mixture-of-Experts training in Megatron-Core that communicates less, earlier and in parallel.

Importing this package touches neither CUDA, Transformer Engine, Apex nor Megatron; `register()` does.
"""

__version__ = "0.1.0"
