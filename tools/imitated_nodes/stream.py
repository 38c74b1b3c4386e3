"""One stream of plain sockets, whose rate its receiver prints: `stream.py receive|send ADDRESS SECONDS`, a script that
runs inside the nodes' namespaces.
"""

from __future__ import annotations

import contextlib
import socket
import sys
import time

WARMUP = 0.5  # of the measured time again, before it: connecting, slow start, full buckets
SILENCE_S = 60.0  # without a byte, after which a measurement gives up
PORT = 5001


def receive(address: str, seconds: float) -> None:
    """Prints "ready", takes one stream and prints the bits/s at which it arrives, without its start."""
    with socket.create_server((address, PORT)) as server:
        server.settimeout(SILENCE_S)
        print("ready", flush=True)
        stream, _ = server.accept()
    with stream:
        stream.settimeout(SILENCE_S)
        buffer = bytearray(1 << 20)
        stream.recv_into(buffer)
        warm = time.monotonic() + WARMUP * seconds
        while (start := time.monotonic()) < warm:
            stream.recv_into(buffer)
        received, now = 0, start
        while now < start + seconds:
            received += stream.recv_into(buffer)
            now = time.monotonic()
    print(received * 8 / (now - start))


def send(address: str) -> None:
    """Sends to a receiver until it has enough and closes the stream."""
    block = bytes(1 << 18)
    with contextlib.suppress(ConnectionError), socket.create_connection((address, PORT)) as stream:
        while True:
            stream.sendall(block)


if __name__ == "__main__":
    role, address, seconds = sys.argv[1:]
    receive(address, float(seconds)) if role == "receive" else send(address)
