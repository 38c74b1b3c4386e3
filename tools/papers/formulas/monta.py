"""MoNTA in closed form: what a pipeline of equal chunks takes (Algorithms 1 to 3), and activations (eq. 2, Table 4).

A pipeline takes one pass of a chunk through all lanes, and N - 1 times its longest lane:

    T = sum(stages) + (N - 1) * max(stages)

with the stages of a chunk (eq. 8 to 10; I bytes of all t expert-TP peers, e ranks in the EP group)

    lane    O1, O2             O3              AA  = I / (N t) * (e - 1) / e / (B1 r1)
    inter   AA                 AA              AG  = I / N * (t - 1) / t / (B2 r2)
    intra   AG + D2D           AG              D2D = I / N / (B3 r3)
    copy    -                  D2D

That is Algorithms 1 (O2) and 2 (O3), with line 19 read as T_min = T and N kept, and with the copy as the longest stage
too, which Algorithm 2's printed formula leaves out. O1 is N = 1 (eq. 11, which leaves D2D out). The choice plays the
schedules that run (systems/monta.py), which is the same where lanes do not disturb each other.
"""

from __future__ import annotations

from collections.abc import Iterable

from megatron_moe_opt.planning.costs.curves import Costs
from megatron_moe_opt.planning.predicting.layer_passes import Pass
from megatron_moe_opt.schedules.monta import even_chunks
from megatron_moe_opt.schedules.schedule import Lane


def stage_seconds(
    one: Pass, level: str, chunks: int, ep_size: int, etp_size: int, costs: Costs
) -> list[tuple[Lane, float]]:
    """Returns lane and seconds of each op of one of `chunks` equal chunks (eq. 8 to 10)."""
    schedule = one.schedule(level, even_chunks(one.exchanged, etp_size, chunks)[:1], ep_size, etp_size)
    return [(op.lane, costs(op)) for op in schedule.ops]


def pipeline_seconds(stages: Iterable[tuple[Lane, float]], chunks: int) -> float:
    """Returns the time of equal chunks that go through these stages, where lanes do not disturb each other."""
    lanes: dict[Lane, float] = {}
    for lane, seconds in stages:
        lanes[lane] = lanes.get(lane, 0.0) + seconds
    return sum(lanes.values()) + (chunks - 1) * max(lanes.values())


def paper_activations(
    tokens: int, sequence: int, hidden: int, heads: int, layers: int, topk: int, tp: int = 1
) -> dict[str, float]:
    """Returns the bytes of eq. 2 and of the rows of Table 4: 16-bit, experts of 4 * hidden without gate, dropout, plain
    attention.

    With tokens = b s, and l layers of which the first pipeline stage holds l / p for p micro-batches. By row:
    "none", "tp", "sp" (with TP), "selective" and "full" (with TP and SP).
    """
    scale, scores = tokens * hidden * layers, 5 * heads * sequence / hidden
    rows = 13 + 21 * topk
    return {
        "none": scale * (rows + scores),
        "tp": scale * (5 + 5 * topk + (8 + 16 * topk + scores) / tp),
        "sp": scale * (rows + scores) / tp,
        "selective": scale * rows / tp,
        "full": scale * 2 / tp,
    }
