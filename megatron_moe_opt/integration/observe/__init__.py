"""Reports of what MoE layers do: telemetry, traffic, routing."""
