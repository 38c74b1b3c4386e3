"""What the process groups of collectives are called in schedules, cost curves and cluster.json."""

from __future__ import annotations

EP = "ep"
EXPERT_TP = "expert-tp"
TP = "tp"
JOINT_GROUP = "ep x expert-tp"


def tokens_group(level: int) -> str:
    """Returns the group in which tokens hop at a level of the network."""
    return f"tokens.{level}"


def experts_group(level: int) -> str:
    """Returns the group in which experts travel at a level of the network."""
    return f"experts.{level}"


def level_of(group: str) -> int:
    """Returns the level of one of these two."""
    return int(group.rpartition(".")[2])
