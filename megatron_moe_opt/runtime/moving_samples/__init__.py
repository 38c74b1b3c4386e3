"""Samples that move to other ranks with the combine (NetMoE)."""
