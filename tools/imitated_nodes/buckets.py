"""The token buckets (tc's tbf) that limit what passes a link."""

from __future__ import annotations

LINK_PACKET, INSIDE_PACKET = 16 * 1024, 64 * 1024  # bytes of the largest packets; the kernel's own are of 64 KiB
MIN_PACKETS = 2  # in a bucket, which drops a packet that is larger, and passes as much at once after a pause
PEAK_PACKET, PEAK_BUCKET = 6_250, 24_000  # bytes, of links whose bucket is emptied at a rate of its own
BURST_S = 1e-3  # at high rates the bucket must bridge a timer's delay


def link_packet(peak: float | None) -> int:
    """Returns the bytes of the largest packets between nodes, given the peak of their links: see `bucket`."""
    return LINK_PACKET if peak is None else PEAK_PACKET


def burst_bytes(rate_bits: int, packet: int) -> int:
    """Returns the depth of the bucket for a rate: at least two of the largest packets, or a millisecond of traffic."""
    return max(MIN_PACKETS * packet, int(rate_bits / 8 * BURST_S))


def bucket(rate_bits: int, packet: int, peak: float | None = None) -> list[str]:
    """Returns the words by which tc makes the bucket of a device.

    Args:
        packet: bytes of the largest packets.
        peak: how many times its rate the device reaches at most; None: what the bucket holds passes at once.
    """
    burst = max(burst_bytes(rate_bits, packet), 0 if peak is None else PEAK_BUCKET)
    words = ["tbf", "rate", f"{rate_bits}bit", "burst", f"{burst}b", "latency", "400ms"]
    if peak is not None:
        words += ["peakrate", f"{int(peak * rate_bits)}bit", "mtu", f"{packet + 64}b"]  # with what a link adds to it
    return words
