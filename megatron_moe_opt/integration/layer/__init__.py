"""The places where systems cut into Megatron's layers."""
