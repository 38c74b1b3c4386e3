"""What a schedule, a layer or a model would cost: time and memory, from measured curves. Imports no torch."""
