"""What `tools/netbox.py` is made of: nodes and their links out of one Linux machine. The standard library alone.

    shape           the cluster that is asked for
    network         its nodes and links: network namespaces, with what limits them from buckets
    measured        what the links carry, by streams of plain sockets (stream), and whether that is the shape
    ranks           the script's ranks on the nodes
    command_line    run and clean

Imports are relative: the command finds this folder beside itself, others find it in `tools`.
"""
