"""The dispatchers: one file a system. Each moves the tokens of one MoE layer to their experts and back."""
