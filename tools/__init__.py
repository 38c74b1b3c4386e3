"""What a checkout has besides the package: measurements and checks for those who work on it.

    bench               what layers, kernels and choices take and hold, on this machine or on netbox's imitated nodes
    gpu                 the checks of machines with GPUs, and what watches commands there
    imitated_nodes      what netbox.py is made of
    megatron_checks     the package against Megatron: its features, versions and own tests, and the names that it moves
    papers              the papers' numbers beside ours, and what the papers say in closed form
    predictions         what the planner expects of clusters and compositions that are not at hand

Beside them are the commands that set up, build and test everything, and what several folders share.
"""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
"""The checkout."""
