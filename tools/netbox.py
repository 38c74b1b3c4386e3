#!/usr/bin/env python3
"""A small cluster out of one Linux machine, with links of chosen bandwidth.

    python tools/netbox.py run --nodes 2 --ranks-per-node 4 --inter 200mbit --intra 1600mbit -- script.py args
    python tools/netbox.py clean

Every node is a network namespace with one full-duplex link (`eth0`) to a bridge. The bridge lives in a namespace of
its own, so the machine's network is never touched. Token buckets (tc's tbf) limit

- the link: `eth0` limits what the node sends, its port on the bridge limits what the node receives (several senders
  to one receiver would otherwise reach it at the sum of their rates);
- `lo`: ranks of one node address each other by the node's `eth0` address, which the kernel routes over `lo`. One
  bucket serves both directions, so `--intra` is what all ranks of a node together exchange inside it.

Every node computes on its own equal share of the machine's processors, where they can be shared equally, and sends by
TCP as CONGESTION (imitated_nodes/network.py) says, whatever the machine's own way is.

The script runs under torchrun in each node, over Gloo. Before that the shape is measured with plain sockets, and a
shape that is off by more than 15 % is refused (`--unmet warn`: the script runs, behind a warning). Everything is
removed at the end, whatever ends the run; what a killed run left behind is removed by the next one, or by `clean`.

Needs root, iproute2 and util-linux; standard library only, but the ranks need torch. See docs/netbox.md.
"""

from __future__ import annotations

import sys

from imitated_nodes.command_line import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
