"""Tokens that hop between the domains of their experts, once over every link."""
