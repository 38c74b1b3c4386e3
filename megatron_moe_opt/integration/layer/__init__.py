"""Where systems cut into Megatron's layers."""
