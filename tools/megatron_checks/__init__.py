"""The package against Megatron: its features, versions and own tests, and the names that it moves."""
