"""tools/predictions/data_centres.py as a user runs it: numbers worked out by hand, the paper's trends, refusals."""

from __future__ import annotations

import pytest

from tools.predictions.data_centres import app

# Of each GPU 1000 tokens of 1024 bytes, and an expert of 2 * 512 * 1024 * 2 bytes.
MODEL = "--tokens 1000 --hidden 512 --ffn-hidden 1024 --topk 1 --no-gated"
GPU = "--peak-tflops 100 --gemm-efficiency 0.5"
DATA, EXPERT = 1000 * 1024, 2 * 512 * 1024 * 2
ATTENTION = 1000 * 512 * (4 * 512 + 1000) / 25e12  # seconds
FFN = 1000 * 512 * 2 * 1024 / 25e12


@pytest.fixture
def run(monkeypatch, command):
    """Exit code, output and errors of `data_centres ARGUMENTS`."""
    monkeypatch.setenv("COLUMNS", "200")
    return lambda *arguments: command(*" ".join(arguments).split(), commands=app, name="data_centres")


def table_rows(output):
    """Returns the cells of a row, by number of data centres and plan: domain, p, ms, speed-up,
    sent, held. One bandwidth.
    """
    rows, number = {}, None
    for line in output.splitlines():
        if line.startswith("│"):
            first, plan, *cells = (cell.strip() for cell in line.strip("│").split("│"))
            number = int(first) if first else number
            rows[number, plan] = cells
    return rows


def test_one_level_worked_out_by_hand(run):
    code, output, _ = run(MODEL, GPU, "--bandwidth 1 --data-centres 8 --no-backward --domain 4 --p 0.8")
    assert code == 0
    rows = table_rows(output)

    def row(size):
        exchange, migration = DATA / 8 * (8 - size) / 1e9, EXPERT * (size - 1) / 1e9
        seconds = ATTENTION + max(FFN, max(migration - ATTENTION, 0) + 2 * exchange)
        stock = ATTENTION + 2 * DATA * 7 / 8 / 1e9
        sent = 2 * DATA / 8 * (8 - size) + EXPERT * (size - 1)
        return [f"{seconds * 1e3:.3f}", f"{stock / seconds:.2f}x", f"{sent / 1e6:.2f}", str(size)]

    assert rows[8, "stock alltoall"] == ["-", "-", *row(1)]
    assert rows[8, "tokens only"] == ["1", "1.0000", *row(1)]
    assert rows[8, "fixed domain"] == ["4", "0.5714", *row(4)]
    assert rows[8, "fixed p"] == ["2", "0.8571", *row(2)]
    assert rows[8, "least time"] == rows[8, "tokens only"]
    assert f"before the experts {ATTENTION * 1e3:.3f} ms, in them {FFN * 1e3:.3f} ms (forward)" in output
    assert "1000 tokens of 1024 bytes for 1 experts each, and 2.097 MB of experts" in output


def test_compression_makes_experts_travel(run):
    common = (MODEL, GPU, "--bandwidth 1 --data-centres 8 --compression-ratio 50")
    sizes = [
        table_rows(run(*common, *more)[1])[8, "least time"]
        for more in (["--no-backward"], ["--gradient-compression-ratio 50"], [])
    ]
    assert [found[0] for found in sizes] == ["8", "8", "1"]  # nobody sends whole gradients to save these few tokens
    assert float(sizes[0][4]) == pytest.approx(EXPERT / 50 * 7 / 1e6, abs=0.01)
    assert float(sizes[1][4]) == pytest.approx(2 * EXPERT / 50 * 7 / 1e6, abs=0.01)


def test_backward_is_twice_the_computation(run):
    fast = "--bandwidth 1e9 --data-centres 8"
    forward = float(table_rows(run(MODEL, GPU, fast, "--no-backward")[1])[8, "tokens only"][2])
    assert forward == pytest.approx((ATTENTION + FFN) * 1e3, abs=1e-3)
    both = float(table_rows(run(MODEL, GPU, fast, "--dense-layers 2")[1])[8, "tokens only"][2])
    assert both == pytest.approx(3 * (3 * ATTENTION + 2 * FFN + FFN) * 1e3, abs=1e-3)


def test_levels_inside_a_data_centre(run):
    """A domain over a data centre's GPUs lets a token cross once and spread inside for nothing."""
    inside = "--level 2:10:0 --level 4:100:5 --topk 4 --experts-per-gpu 2"
    code, output, _ = run(MODEL, GPU, "--bandwidth 0.1 --data-centres 4", inside)
    assert code == 0 and "2 x 4 GPU(s) in a data centre" in output
    rows = table_rows(output)
    assert rows[4, "tokens only"][0] == "1 x 1 x 1"
    sent = [float(rows[4, plan][4]) for plan in ("stock alltoall", "tokens only")]
    # 3 of 4 rows cross; of 4 different ones of 64 experts, a data centre's 16 have none in 48..45 / 64..61 draws.
    nothing = 48 * 47 * 46 * 45 / (64 * 63 * 62 * 61)
    assert sent == pytest.approx([4 * 4 * DATA * 3 / 4 / 1e6, 4 * DATA * 3 * (1 - nothing) / 1e6], abs=0.01)
    assert all(int(rows[4, plan][5]) % 2 == 0 for plan in ("tokens only", "fixed domain", "fixed p", "least time"))


def speedups(output, plan, numbers):
    rows = table_rows(output)
    return [float(rows[number, plan][3].rstrip("x")) for number in numbers]


def test_a_fixed_domain_gains_less_the_more_data_centres(run):
    """HybridEP's Fig. 17(a): towards no gain where bytes decide, towards the domain size where messages do."""
    numbers = (10, 100, 1000)
    scales = (MODEL, GPU, "--bandwidth 1 --data-centres 10,100,1000", "--compression-ratio 50 --no-backward")
    output = run(*scales)[1]
    falling = speedups(output, "fixed domain", numbers)
    assert falling == sorted(falling, reverse=True) and falling[0] > 1.1 and falling[-1] == 1
    least = speedups(output, "least time", numbers)
    assert all(best >= max(one, 1) for best, one in zip(least, falling, strict=True))
    assert speedups(run(*scales, "--latency 100000")[1], "fixed domain", numbers)[-1] == 2


def test_a_fixed_proportion_gains_while_experts_are_cheap(run):
    """HybridEP's Fig. 17(b): up to 1 / p where experts hide or weigh nothing, more where messages cost; yet experts
    that do not hide grow with the domain.
    """
    numbers = (10, 100, 1000)
    scales = (MODEL, GPU, "--bandwidth 0.1 --data-centres 10,100,1000 --p 0.5 --no-backward")
    weightless = speedups(run(*scales, "--compression-ratio 1e9")[1], "fixed p", numbers)
    assert weightless == sorted(weightless) and 1.9 < weightless[-1] <= 2
    heavy = speedups(run(*scales, "--compression-ratio 50")[1], "fixed p", numbers)
    assert heavy == sorted(heavy, reverse=True) and heavy[-1] < 1
    messages = run(*scales, "--compression-ratio 1e9 --latency 100000 --p 0.9")[1]
    assert table_rows(messages)[1000, "fixed p"][:2] == ["100", "0.9009"]
    # 2 * 999 messages against 99 in the domain and 2 * 9 to others.
    assert speedups(messages, "fixed p", numbers)[-1] == pytest.approx(1998 / 117, rel=0.01)


def test_a_table_for_every_bandwidth_and_a_picture(run, tmp_path):
    picture = tmp_path / "picture.png"
    code, output, _ = run(MODEL, GPU, f"--bandwidth 0.1,1 --data-centres 2,4 --latency 100 -o {picture}")
    assert code == 0
    assert "0.1 GB/s of a GPU between data centres, 100 us a message" in output
    assert "1 GB/s of a GPU between data centres, 100 us a message" in output
    assert output.count("tokens only") == 4
    assert f"written to {picture}" in output and picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ("--bandwidth 1 --domain 3", "--domain 3 does not divide --data-centres 10: choose a common divisor of all"),
        (
            "--bandwidth 1 --data-centres 1",
            "--data-centres 1 has no links between data centres: give 2 or more",
        ),
        (
            "--bandwidth 1 --data-centres many",
            "--data-centres many: write numbers from 1 to 2147483647, separated by commas, such as 256,1024",
        ),
        (
            "--bandwidth 1,0",
            "--bandwidth 1,0: write GB/s above 0 of a GPU, separated by commas, such as 0.125,1.25",
        ),
        (
            "--bandwidth inf",
            "--bandwidth inf: write GB/s above 0 of a GPU, separated by commas, such as 0.125,1.25",
        ),
        (
            "--bandwidth 1 --level 8:400",
            "--level 8:400: write workers, GB/s of a GPU and microseconds a message, such as 8:400:5",
        ),
        (
            "--bandwidth 1 --level 1.5:400:5",
            "--level 1.5:400:5: write workers, GB/s of a GPU and microseconds a message, such as 8:400:5",
        ),
        (
            "--bandwidth 1 --level 8:400:-5",
            "--level 8:400:-5: write workers, GB/s of a GPU and microseconds a message, such as 8:400:5",
        ),
        (
            "--bandwidth 1 --topk 11",
            "--topk 11 is more than the 10 experts of --data-centres 10: choose at most that, or more "
            "--experts-per-gpu",
        ),
        ("--bandwidth 1 --latency inf", "--latency inf is not a finite number: give one"),
        (
            "--bandwidth 1 -o nowhere/a.png",
            "--output nowhere/a.png: its folder does not exist; create it or choose another",
        ),
        ("--bandwidth 1 -o a.gif", "the picture a.gif has no known format: end its name in .png, .svg, .pdf"),
    ],
)
def test_refusals(run, arguments, sentence):
    code, output, error = run(MODEL, GPU, arguments)
    assert (code, output) == (2, "")
    assert error == f"data_centres: {sentence}\n"


def test_a_missing_bandwidth_is_refused(run):
    code, _, error = run(MODEL, GPU)
    assert code == 2 and "--bandwidth" in error
