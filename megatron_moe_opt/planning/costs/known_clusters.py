"""Clusters that are known from data sheets and published measurements, to plan for what is not at hand.

Every number says where it is from. What is said to be assumed was neither published nor measured: where a plan rests on
it, measure the cluster with `moe-opt profile` and plan from that file. Abbreviations of sources:

    MoNTA          its Tables 5 and 8, and the Discussion (efficiencies of an A800 cluster)
    HybridEP       its Testbed section (data centres of 8 A800 each)
    Parm           its Table II and section VI-B
    MPMoE          its section V-A
    NetMoE         its Table 2
    NCCL           github.com/NVIDIA/nccl, src/graph/tuning.cc: microseconds of the Simple protocol; 8.4 for a
                   collective, and for a step 3.4 over NVLink, 5.7 over PCIe, 9.6 over a network
    nccl-tests N   github.com/NVIDIA/nccl-tests, answers of its maintainers in issue N
    nvbandwidth N  github.com/NVIDIA/nvbandwidth, measurements in issue N
    DeepEP         github.com/deepseek-ai/DeepEP, the performance tables of README.md and docs/legacy.md

Data sheets are NVIDIA's: A100 80GB (of which the A800 differs in NVLink), H100, H200, GB200 NVL72. Links count one way.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from megatron_moe_opt.errors import ConfigurationError
from megatron_moe_opt.planning.costs.curves import Slowdown
from megatron_moe_opt.planning.training.throughput import GpuSpeed
from megatron_moe_opt.schedules.schedule import Lane

GB, TB, GIB = 1e9, 1e12, 2**30
MB = 10**6
GBIT = 1e9 / 8
US = 1e-6
TFLOPS = 1e12

FURTHER_PEER = 1 * US
"""Seconds that a further peer adds on a network or PCIe; half of it over NVLink. NCCL serves
several at a time. Assumed.
"""

Efficiencies = tuple[tuple[int, float], ...]
"""How well ops use a link: (bytes as Op.size counts them, part of the bandwidth that such ops reach)."""

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


@dataclass(frozen=True)
class Fabric:
    """What joins GPUs, or groups of them that are joined otherwise."""

    bandwidth: float
    """Bytes a second that a GPU sends or, where the link is shared, all GPUs of a group together."""
    efficiencies: Efficiencies
    first: float = 0.0
    """Seconds of a collective with one peer, whatever it carries, besides what the efficiencies contain."""
    further: float = 0.0
    """Seconds that every peer after the first adds."""
    shared: bool = False
    """Whether the GPUs of a group (a node, a data centre) have one link among them."""


@dataclass(frozen=True)
class KnownCluster:
    """A kind of cluster, of any size."""

    title: str
    device: GpuSpeed
    memory: float
    """Bytes of a GPU's memory."""
    memory_bandwidth: float
    """Bytes a second that a GPU's memory reads and writes together."""
    copy_bandwidth: float
    """Bytes a second of rows that are copied."""
    host_bandwidth: float
    """Bytes a second between a GPU and its host, reached."""
    node: int
    """GPUs of a node, which `inside` joins."""
    capability: int
    """The GPUs' major compute capability."""
    inside: Fabric
    between: Fabric
    """The network between nodes."""
    data_centres: int = 1
    far: Fabric | None = None
    """The network between data centres; None: there is one data centre."""
    overhead: float = 10 * US
    """The seconds that an op takes besides: its launch, and the event that another stream waits for. Assumed."""
    slowdown: Slowdown = field(default_factory=lambda: DISTURBED)

    def levels(self, world: int) -> list[tuple[int, Fabric]]:
        """Returns the levels as (consecutive ranks that a level's fabric joins, the fabric), the innermost first.

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


# Data sheet: 312 TFLOPS dense, 80 GB at 2.039 TB/s (SXM), 1.935 TB/s (PCIe). That large products reach 60 % of the
# peak in training is assumed, for all GPUs here.
A800 = GpuSpeed(312 * TFLOPS, 0.6)

A800_IB200 = KnownCluster(
    title="8x A800 a node, NVLink, 200 Gb/s InfiniBand",
    device=A800,
    memory=80 * GIB,
    memory_bandwidth=2.039 * TB,
    copy_bandwidth=0.8 * 1.6 * TB,  # MoNTA, Table 8: 64 MB in 0.05 ms, "80 %"
    host_bandwidth=25.1 * GB,  # nvbandwidth 42: A100 SXM4 over PCIe 4.0 x16
    node=8,
    capability=8,
    # MoNTA, Table 5: 200 GB/s; Table 8 and the Discussion (0.803 at a sequence of 256K: 8192 MB): AllGather of 8 GPUs.
    # Their latency is in the points.
    inside=Fabric(200 * GB, ((64 * MB, 0.726), (256 * MB, 0.776), (8192 * MB, 0.803))),
    # MoNTA: 25 GB/s a GPU; AllToAll of 16 GPUs, at 256K 1024 MB with 0.741. Measured with 8 peers in the other node,
    # and used by the paper for one.
    between=Fabric(
        25 * GB, ((8 * MB, 0.427), (32 * MB, 0.633), (256 * MB, 0.741), (1024 * MB, 0.741)), further=FURTHER_PEER
    ),
)

# nccl-tests 212: of 450 GB/s NCCL reaches 370 (326: 360), the rest is NVLink's protocol.
_HOPPER_NVLINK = Fabric(450 * GB, ((1, 0.82),), first=(8.4 + 3.4) * US, further=FURTHER_PEER / 2)
# One ConnectX-7 a GPU. nccl-tests 267: 48 to 49 of 50 GB/s; an all-to-all cannot add up several NICs. DeepEP (legacy):
# 43 of 50 GB/s with EP 16, which is taken here.
_NDR400 = Fabric(50 * GB, ((1, 0.86),), first=(8.4 + 9.6) * US, further=FURTHER_PEER)

H100_IB400 = KnownCluster(
    title="8x H100 a node, NVLink, 400 Gb/s InfiniBand a GPU",
    device=GpuSpeed(989 * TFLOPS, 0.6),  # data sheet H100 SXM: 1979 with sparsity
    memory=80 * GIB,
    memory_bandwidth=3.35 * TB,
    copy_bandwidth=0.8 * 3.35 * TB / 2,  # a row is read and written; 80 % as MoNTA has it
    host_bandwidth=52.8 * GB,  # nvbandwidth 24: PCIe 5.0 x16
    node=8,
    capability=9,
    inside=_HOPPER_NVLINK,
    between=_NDR400,
)

H200_IB400 = KnownCluster(
    title="8x H200 a node, NVLink, 400 Gb/s InfiniBand a GPU",
    device=GpuSpeed(989 * TFLOPS, 0.6),  # data sheet H200 SXM: 1979 with sparsity
    memory=141 * GIB,
    memory_bandwidth=4.8 * TB,
    copy_bandwidth=0.8 * 4.8 * TB / 2,
    host_bandwidth=52.8 * GB,  # nvbandwidth 24: PCIe 5.0 x16
    node=8,
    capability=9,
    inside=_HOPPER_NVLINK,
    between=_NDR400,
)

B200_NVL72 = KnownCluster(
    title="B200 in GB200 NVL72 racks, NVLink inside a rack, 400 Gb/s InfiniBand a GPU between racks",
    device=GpuSpeed(2500 * TFLOPS, 0.6),  # data sheet GB200 NVL72: 360 PFLOPS of 72 GPUs with sparsity
    memory=186 * GIB,  # data sheet: 13.4 TB of 72 GPUs
    memory_bandwidth=8 * TB,  # data sheet: 576 TB/s of 72 GPUs
    copy_bandwidth=0.8 * 8 * TB / 2,
    # Data sheet: NVLink-C2C 900 GB/s both ways for two GPUs. That 80 % are reached is assumed.
    host_bandwidth=0.8 * 225 * GB,
    # Of the 72 GPUs of a rack 64 train: group sizes are mostly powers of two.
    node=64,
    capability=10,
    # Data sheet: 130 TB/s both ways of 72 GPUs, 900 GB/s one way of one. DeepEP: 643 to 740 GB/s with EP 8.
    inside=Fabric(900 * GB, ((1, 0.75),), first=(8.4 + 3.4) * US, further=FURTHER_PEER / 2),
    between=_NDR400,
)

PCIE = KnownCluster(
    title="8x A100 PCIe a node without NVLink, one 100 Gb/s NIC a node",
    device=A800,
    memory=80 * GIB,
    memory_bandwidth=1.935 * TB,
    copy_bandwidth=0.8 * 1.935 * TB / 2,
    host_bandwidth=25.1 * GB,  # nvbandwidth 42: PCIe 4.0 x16
    node=8,
    capability=8,
    # PCIe 4.0 x16: 32 GB/s; nvbandwidth 42: 25.1 to and from the host. Between GPUs the same is assumed.
    inside=Fabric(32 * GB, ((1, 0.78),), first=(8.4 + 5.7) * US, further=FURTHER_PEER),
    # Parm, testbed B: a ConnectX-5 with 100 Gb/s in each node. 90 % of it is assumed to be reached.
    between=Fabric(100 * GBIT, ((1, 0.9),), first=(8.4 + 9.6) * US, further=FURTHER_PEER, shared=True),
)

TWO_DATA_CENTRES = KnownCluster(
    title="two data centres with 10 Gb/s between them, 8x A800 a node on PCIe 3.0, 200 Gb/s InfiniBand between nodes",
    device=A800,
    memory=80 * GIB,
    memory_bandwidth=2.039 * TB,
    copy_bandwidth=0.8 * 1.6 * TB,
    host_bandwidth=12.5 * GB,  # PCIe 3.0 x16, at the part of PCIe 4.0 that nvbandwidth 42 has
    node=8,
    capability=8,
    # HybridEP: PCIe 3.0 x16, 128 Gb/s, inside a data centre of one node; 10 Gb/s Ethernet between data centres. The
    # parts that are reached are assumed; so is InfiniBand between nodes where a data centre has several.
    inside=Fabric(128 * GBIT, ((1, 0.78),), first=(8.4 + 5.7) * US, further=FURTHER_PEER),
    between=A800_IB200.between,
    data_centres=2,
    # TCP over a metropolitan line; its latency is assumed.
    far=Fabric(10 * GBIT, ((1, 0.9),), first=500 * US, further=50 * US, shared=True),
)

# The clusters that the papers measured on, as far as they describe them. MoNTA's is A800_IB200, HybridEP's Cluster-M
# TWO_DATA_CENTRES at 16 GPUs. Data sheets: NVIDIA's of RTX 4090 (Ada whitepaper), RTX 2080 Ti (Turing whitepaper),
# V100, A100 40GB. What is reached of a link is assumed where no source is named.
_COLLECTIVE, _NVLINK_STEP, _NETWORK_STEP = 8.4 * US, 3.4 * US, 9.6 * US
_REACHED = 0.86  # of a network: as for H100_IB400, from DeepEP; assumed here
_NVLINK_REACHED = 0.8  # as MoNTA measured on an A800 (Table 8 and Discussion); assumed here


def _gathering(beta: float, bandwidth: float) -> float:
    """Returns the part of a link's bandwidth that Parm's AllGather reached.

    Section VI-B has beta seconds for an element of what N_MP ranks have together. Taken for N_MP = 4 and elements of 4
    bytes, of which 3/4 cross the link; the paper says neither.
    """
    return 3 / 4 * 4 / beta / bandwidth


_ETHERNET = Fabric(100 * GBIT, ((1, 0.9),), first=_COLLECTIVE + _NETWORK_STEP, further=FURTHER_PEER, shared=True)
"""The network of Parm, Table II: a ConnectX-5 of 100 Gb/s a node. 90 % of it is assumed to be reached."""

PARM_A = KnownCluster(
    title="Parm's testbed A: 8x RTX 4090 in one node, PCIe 4.0 x16",
    device=GpuSpeed(165.2 * TFLOPS, 0.6),  # data sheet: 16-bit products, sums in fp32
    memory=24 * GIB,
    memory_bandwidth=1.008 * TB,
    copy_bandwidth=0.8 * 1.008 * TB / 2,
    host_bandwidth=25.1 * GB,  # PCIe 4.0 x16, as nvbandwidth 42 has it
    node=8,
    capability=8,
    # Table II: PCIe 4.0 x16, 32 GB/s. Section VI-B: alpha 6.64e-4 s, beta 5.38e-10 s an element.
    inside=Fabric(32 * GB, ((1, _gathering(5.38e-10, 32 * GB)),), first=664 * US),
    between=_ETHERNET,  # the testbed has one node: more are taken to be joined as testbed B's
)

PARM_B = KnownCluster(
    title="Parm's testbed B: 4x RTX 2080 Ti a node, PCIe 3.0 x16, one 100 Gb/s NIC a node",
    device=GpuSpeed(53.8 * TFLOPS, 0.6),  # data sheet: fp16 products, sums in fp32
    memory=11 * GIB,
    memory_bandwidth=616 * GB,
    copy_bandwidth=0.8 * 616 * GB / 2,
    host_bandwidth=12.5 * GB,  # PCIe 3.0 x16, at the part of PCIe 4.0 that nvbandwidth 42 has
    node=4,
    capability=7,
    # Table II: PCIe 3.0 x16, 16 GB/s. Section VI-B: alpha 1.09e-4 s, beta 7.14e-10 s an element.
    inside=Fabric(16 * GB, ((1, _gathering(7.14e-10, 16 * GB)),), first=109 * US),
    between=_ETHERNET,
)

ADIRA = KnownCluster(
    title="MPMoE's Adira: 8x A100 of 40 GB a node (DGX A100), NVLink, 200 Gb/s InfiniBand a GPU",
    device=A800,  # 312 TFLOPS, as the A100
    memory=40 * GIB,
    memory_bandwidth=1.555 * TB,
    copy_bandwidth=0.8 * 1.555 * TB / 2,
    host_bandwidth=25.1 * GB,  # nvbandwidth 42
    node=8,
    capability=8,
    # Section V-A: third NVLink; data sheet 600 GB/s both ways.
    inside=Fabric(300 * GB, ((1, _NVLINK_REACHED),), first=_COLLECTIVE + _NVLINK_STEP, further=FURTHER_PEER / 2),
    # Section V-A: "200 Gbps HDR InfiniBand". A DGX A100 has such a card for each GPU; the paper may mean one a node.
    between=Fabric(25 * GB, ((1, _REACHED),), first=_COLLECTIVE + _NETWORK_STEP, further=FURTHER_PEER),
)

VALOR = KnownCluster(
    title="MPMoE's Valor: 4x V100 of 16 GB a node, NVLink, 56 Gb/s InfiniBand a node",
    device=GpuSpeed(125 * TFLOPS, 0.6),  # data sheet: fp16
    memory=16 * GIB,
    memory_bandwidth=900 * GB,
    copy_bandwidth=0.8 * 900 * GB / 2,
    host_bandwidth=12.5 * GB,  # PCIe 3.0 x16
    node=4,
    capability=7,
    # Section V-A: second NVLink; data sheet 300 GB/s both ways.
    inside=Fabric(150 * GB, ((1, _NVLINK_REACHED),), first=_COLLECTIVE + _NVLINK_STEP, further=FURTHER_PEER / 2),
    # Section V-A: 56 Gb/s (FDR's rate, printed HDR) for a node's four GPUs.
    between=Fabric(56 * GBIT, ((1, _REACHED),), first=_COLLECTIVE + _NETWORK_STEP, further=FURTHER_PEER, shared=True),
)

NETMOE_A800 = KnownCluster(
    title="NetMoE's: 8x A800 of 40 GB a node, NVLink, InfiniBand of 100 GB/s a node",
    device=A800,
    memory=40 * GIB,
    memory_bandwidth=1.555 * TB,
    copy_bandwidth=0.8 * 1.555 * TB / 2,
    host_bandwidth=25.1 * GB,
    node=8,
    capability=8,
    # Table 2: 400 GB/s; data sheet of the A800: both ways together.
    inside=Fabric(200 * GB, ((1, _NVLINK_REACHED),), first=_COLLECTIVE + _NVLINK_STEP, further=FURTHER_PEER / 2),
    # Table 2: 100 GB/s, taken for one way of a node.
    between=Fabric(100 * GB, ((1, _REACHED),), first=_COLLECTIVE + _NETWORK_STEP, further=FURTHER_PEER, shared=True),
)

# HybridEP, Testbed: a node is a data centre; PCIe 3.0 inside, 10 Gb/s between.
HYBRIDEP_S = replace(TWO_DATA_CENTRES, title="HybridEP's Cluster-S: 8x A800 on PCIe 3.0", data_centres=1, far=None)
HYBRIDEP_L = replace(
    TWO_DATA_CENTRES, title="HybridEP's Cluster-L: four data centres of 8x A800, 10 Gb/s each", data_centres=4
)

KNOWN_CLUSTERS: Mapping[str, KnownCluster] = {
    "a800-ib200": A800_IB200,
    "h100-ib400": H100_IB400,
    "h200-ib400": H200_IB400,
    "b200-nvl72": B200_NVL72,
    "pcie": PCIE,
    "two-data-centres": TWO_DATA_CENTRES,
    "parm-a": PARM_A,
    "parm-b": PARM_B,
    "mpmoe-adira": ADIRA,
    "mpmoe-valor": VALOR,
    "netmoe": NETMOE_A800,
    "hybridep-s": HYBRIDEP_S,
    "hybridep-l": HYBRIDEP_L,
}
