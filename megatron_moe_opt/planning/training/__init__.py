"""What a whole model's training takes: parameters, memory, throughput."""
