"""Clusters that are known from data sheets and published measurements, to plan for what is not at hand.

Every number says where it is from. What is said to be assumed was neither published nor measured: where a plan rests on
it, measure the cluster with `moe-opt profile` and plan from that file. Abbreviations of sources:

    MoNTA          its Tables 5 and 8, and the Discussion (efficiencies of an A800 cluster)
    HybridEP       its Testbed section (data centres of 8 A800 each)
    Parm           its Table II
    NCCL           github.com/NVIDIA/nccl, src/graph/tuning.cc: microseconds of the Simple protocol; 8.4 for a
                   collective, and for a step 3.4 over NVLink, 5.7 over PCIe, 9.6 over a network
    nccl-tests N   github.com/NVIDIA/nccl-tests, answers of its maintainers in issue N
    nvbandwidth N  github.com/NVIDIA/nvbandwidth, measurements in issue N
    DeepEP         github.com/deepseek-ai/DeepEP, the performance tables of README.md and docs/legacy.md

Data sheets are NVIDIA's: A100 80GB (of which the A800 differs in NVLink), H100, H200, GB200 NVL72. Links count one way.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from megatron_moe_opt.errors import ConfigurationError
from megatron_moe_opt.planning.predicting.simulator import Slowdown
from megatron_moe_opt.planning.training.throughput import GpuSpeed
from megatron_moe_opt.schedules.schedule import Lane

GB, TB, GIB = 1e9, 1e12, 2**30
MB = 10**6
GBIT = 1e9 / 8
US = 1e-6
TFLOPS = 1e12

FURTHER_PEER = 1 * US
"""Of a network or PCIe; half of it over NVLink. NCCL sends to several peers at a time. Assumed."""

Efficiencies = tuple[tuple[int, float], ...]
"""(bytes as Op.size counts them, part of the bandwidth that such ops reach)."""


@dataclass(frozen=True)
class Fabric:
    """What joins GPUs, or groups of them that are joined otherwise."""

    bandwidth: float
    """Bytes a second that a GPU sends; of all GPUs of a group together where it is shared."""
    efficiencies: Efficiencies
    first: float = 0.0
    """Seconds of a collective with one peer, whatever it carries, besides what the efficiencies contain."""
    further: float = 0.0
    """Seconds that every further peer adds."""
    shared: bool = False
    """Whether the GPUs of a group (a node, a data centre) have one link among them."""


@dataclass(frozen=True)
class KnownCluster:
    """A kind of cluster, of any size."""

    title: str
    device: GpuSpeed
    memory: float
    """Bytes of a GPU."""
    memory_bandwidth: float
    """Bytes a second that a GPU's memory reads and writes together."""
    copy_bandwidth: float
    """Bytes a second of rows that are copied."""
    host_bandwidth: float
    """Bytes a second between a GPU and its host, reached."""
    node: int
    """GPUs that `inside` joins."""
    inside: Fabric
    between: Fabric
    """Of nodes."""
    data_centres: int = 1
    far: Fabric | None = None
    """Of data centres."""
    overhead: float = 10 * US
    """Of an op: its launch, and the event that another stream waits for. Assumed."""
    slowdown: Slowdown = field(default_factory=dict)

    def levels(self, world: int) -> list[tuple[int, Fabric]]:
        """(consecutive ranks that a level's fabric joins, the fabric), the innermost first.

        Raises:
            ConfigurationError: ranks that do not fill nodes, or data centres, alike.
        """
        parts = self.data_centres
        if world % parts:
            raise ConfigurationError(
                f"--world {world} does not fill {parts} data centres alike: choose a multiple of {parts}"
            )
        centre = world // parts
        if centre > self.node and centre % self.node:
            raise ConfigurationError(
                f"--world {world} does not fill nodes of {self.node} GPUs: choose a multiple of {self.node * parts}"
            )
        found = [(min(self.node, centre), self.inside)]
        if centre > self.node:
            found.append((centre, self.between))
        if self.far is not None:
            found.append((world, self.far))
        return found


# MPMoE's Fig. 3 draws how much lanes slow each other down and prints no number. By its text computation is hardly
# slowed, communication is, and more so beside copies to the host, with which it shares PCIe. MoNTA reports that
# AllGather and copy conflict over memory, without a number. These rates are assumed to fit that.
DISTURBED: Slowdown = {
    (Lane.INTER, Lane.COMPUTE): 0.95,
    (Lane.INTRA, Lane.COMPUTE): 0.95,
    (Lane.COMPUTE, Lane.INTER): 0.95,
    (Lane.COMPUTE, Lane.INTRA): 0.95,
    (Lane.INTER, Lane.D2H): 0.8,
    (Lane.INTER, Lane.H2D): 0.8,
    (Lane.INTRA, Lane.COPY): 0.95,
    (Lane.COPY, Lane.INTRA): 0.95,
}

# Data sheet: 312 TFLOPS dense, 80 GB at 2.039 TB/s (SXM), 1.935 TB/s (PCIe). That large products reach 60 % of the
# peak in training is assumed, for all GPUs here.
A800 = GpuSpeed(312 * TFLOPS, 0.6)

A800_IB200 = KnownCluster(
    title="8x A800 a node, NVLink, 200 Gb/s InfiniBand",
    device=A800,
    memory=80 * GB,
    memory_bandwidth=2.039 * TB,
    copy_bandwidth=0.8 * 1.6 * TB,  # MoNTA, Table 8: 64 MB in 0.05 ms, "80 %"
    host_bandwidth=25.1 * GB,  # nvbandwidth 42: A100 SXM4 over PCIe 4.0 x16
    node=8,
    # MoNTA, Table 5: 200 GB/s; Table 8 and the Discussion (0.803 at a sequence of 256K: 8192 MB): AllGather of 8 GPUs.
    # Their latency is in the points.
    inside=Fabric(200 * GB, ((64 * MB, 0.726), (256 * MB, 0.776), (8192 * MB, 0.803))),
    # MoNTA: 25 GB/s a GPU; AllToAll of 16 GPUs, at 256K 1024 MB with 0.741. Measured with 8 peers in the other node,
    # and used by the paper for one.
    between=Fabric(
        25 * GB, ((8 * MB, 0.427), (32 * MB, 0.633), (256 * MB, 0.741), (1024 * MB, 0.741)), further=FURTHER_PEER
    ),
    slowdown=DISTURBED,
)

# nccl-tests 212: of 450 GB/s NCCL reaches 370 (326: 360), the rest is NVLink's protocol.
_HOPPER_NVLINK = Fabric(450 * GB, ((1, 0.82),), first=(8.4 + 3.4) * US, further=FURTHER_PEER / 2)
# One ConnectX-7 a GPU. nccl-tests 267: 48 to 49 of 50 GB/s; an all-to-all cannot add up several NICs. DeepEP (legacy):
# 43 of 50 GB/s with EP 16, which is taken here.
_NDR400 = Fabric(50 * GB, ((1, 0.86),), first=(8.4 + 9.6) * US, further=FURTHER_PEER)

H100_IB400 = KnownCluster(
    title="8x H100 a node, NVLink, 400 Gb/s InfiniBand a GPU",
    device=GpuSpeed(989 * TFLOPS, 0.6),  # data sheet H100 SXM: 1979 with sparsity
    memory=80 * GB,
    memory_bandwidth=3.35 * TB,
    copy_bandwidth=0.8 * 3.35 * TB / 2,  # a row is read and written; 80 % as MoNTA has it
    host_bandwidth=52.8 * GB,  # nvbandwidth 24: PCIe 5.0 x16
    node=8,
    inside=_HOPPER_NVLINK,
    between=_NDR400,
    slowdown=DISTURBED,
)

H200_IB400 = KnownCluster(
    title="8x H200 a node, NVLink, 400 Gb/s InfiniBand a GPU",
    device=GpuSpeed(989 * TFLOPS, 0.6),  # data sheet H200 SXM: 1979 with sparsity
    memory=141 * GB,
    memory_bandwidth=4.8 * TB,
    copy_bandwidth=0.8 * 4.8 * TB / 2,
    host_bandwidth=52.8 * GB,  # nvbandwidth 24: PCIe 5.0 x16
    node=8,
    inside=_HOPPER_NVLINK,
    between=_NDR400,
    slowdown=DISTURBED,
)

B200_NVL72 = KnownCluster(
    title="B200 in GB200 NVL72 racks, NVLink inside a rack, 400 Gb/s InfiniBand a GPU between racks",
    device=GpuSpeed(2500 * TFLOPS, 0.6),  # data sheet GB200 NVL72: 360 PFLOPS of 72 GPUs with sparsity
    memory=186 * GB,  # data sheet: 13.4 TB of 72 GPUs
    memory_bandwidth=8 * TB,  # data sheet: 576 TB/s of 72 GPUs
    copy_bandwidth=0.8 * 8 * TB / 2,
    # Data sheet: NVLink-C2C 900 GB/s both ways for two GPUs. That 80 % are reached is assumed.
    host_bandwidth=0.8 * 225 * GB,
    # Of the 72 GPUs of a rack 64 train: group sizes are mostly powers of two.
    node=64,
    # Data sheet: 130 TB/s both ways of 72 GPUs, 900 GB/s one way of one. DeepEP: 643 to 740 GB/s with EP 8.
    inside=Fabric(900 * GB, ((1, 0.75),), first=(8.4 + 3.4) * US, further=FURTHER_PEER / 2),
    between=_NDR400,
    slowdown=DISTURBED,
)

PCIE = KnownCluster(
    title="8x A100 PCIe a node without NVLink, one 100 Gb/s NIC a node",
    device=A800,
    memory=80 * GB,
    memory_bandwidth=1.935 * TB,
    copy_bandwidth=0.8 * 1.935 * TB / 2,
    host_bandwidth=25.1 * GB,  # nvbandwidth 42: PCIe 4.0 x16
    node=8,
    # PCIe 4.0 x16: 32 GB/s; nvbandwidth 42: 25.1 to and from the host. Between GPUs the same is assumed.
    inside=Fabric(32 * GB, ((1, 0.78),), first=(8.4 + 5.7) * US, further=FURTHER_PEER),
    # Parm, testbed B: a ConnectX-5 with 100 Gb/s in each node. 90 % of it is assumed to be reached.
    between=Fabric(100 * GBIT, ((1, 0.9),), first=(8.4 + 9.6) * US, further=FURTHER_PEER, shared=True),
    slowdown=DISTURBED,
)

TWO_DATA_CENTRES = KnownCluster(
    title="two data centres with 10 Gb/s between them, 8x A800 a node on PCIe 3.0, 200 Gb/s InfiniBand between nodes",
    device=A800,
    memory=80 * GB,
    memory_bandwidth=2.039 * TB,
    copy_bandwidth=0.8 * 1.6 * TB,
    host_bandwidth=12.5 * GB,  # PCIe 3.0 x16, at the part of PCIe 4.0 that nvbandwidth 42 has
    node=8,
    # HybridEP: PCIe 3.0 x16, 128 Gb/s, inside a data centre of one node; 10 Gb/s Ethernet between data centres. The
    # parts that are reached are assumed; so is InfiniBand between nodes where a data centre has several.
    inside=Fabric(128 * GBIT, ((1, 0.78),), first=(8.4 + 5.7) * US, further=FURTHER_PEER),
    between=A800_IB200.between,
    data_centres=2,
    # TCP over a metropolitan line; its latency is assumed.
    far=Fabric(10 * GBIT, ((1, 0.9),), first=500 * US, further=50 * US, shared=True),
    slowdown=DISTURBED,
)

KNOWN_CLUSTERS: Mapping[str, KnownCluster] = {
    "a800-ib200": A800_IB200,
    "h100-ib400": H100_IB400,
    "h200-ib400": H200_IB400,
    "b200-nvl72": B200_NVL72,
    "pcie": PCIE,
    "two-data-centres": TWO_DATA_CENTRES,
}
