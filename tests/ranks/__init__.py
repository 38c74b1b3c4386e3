"""Four Gloo rank processes, started once for a test session, and what Megatron needs on them."""
