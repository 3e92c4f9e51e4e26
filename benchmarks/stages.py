"""Times each stage of custom_kernel on a GPU, from the profiler's record of single calls.

    python benchmarks/stages.py [--shape 640x512 ...] [--calls 5]

Per shape (batch x n) and kernel: launches a call, microseconds a call, microseconds of the first three launches. Of larfb's first launch
also GB/s of C, read once and written once, and TFLOP/s with the three products of the 3-split counted. Medians over the
calls; L2 is cleared before each.
"""
import argparse
import statistics
import sys
from collections.abc import Callable
from pathlib import Path

import rich.console
import rich.table
import torch
from torch.profiler import ProfilerActivity, profile

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from submission import PANEL, custom_kernel, plan_for  # noqa: E402

SHAPES = ("20x32", "40x176", "40x352", "640x512", "60x1024", "8x2048", "2x4096",
          "1x256", "1x512", "1x1024", "1x2048", "1x4096", "132x256", "132x1024")


def shape(text: str) -> tuple[int, int]:
    batch, _, n = text.partition("x")
    if not (batch.isdigit() and n.isdigit() and int(batch) and int(n)):
        raise argparse.ArgumentTypeError(f"expected BATCHxN, got {text!r}")
    return int(batch), int(n)


def matrices(batch: int, n: int) -> torch.Tensor:
    """Random float32 matrices, batch x n x n, the same in every process."""
    return torch.randn(batch, n, n, generator=torch.Generator("cuda").manual_seed(1), device="cuda")


def launches(call: Callable[[], object]) -> list[tuple[str, float]]:
    """(kernel, microseconds) of one call's launches on the current device, in order."""
    torch.empty(256 << 20, dtype=torch.uint8, device="cuda").zero_()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as record:
        call()
        torch.cuda.synchronize()
    events = [e for e in record.events() if e.device_type == torch.autograd.DeviceType.CUDA and "_kernel" in e.name and any(k in e.name for k in ("geqr2", "panel", "pair", "larfb"))]
    events.sort(key=lambda e: e.time_range.start)
    return [(e.name.removeprefix("void ").split("<")[0].split("(")[0], e.device_time) for e in events]


def stages(call: Callable[[], object], calls: int) -> dict[str, list[float]]:
    """Kernel -> microseconds of each of its launches, in order (medians over the calls)."""
    for _ in range(2):
        call()
    records = [launches(call) for _ in range(calls)]
    return {name: [statistics.median(times) for times in zip(*([time for kernel, time in record if kernel == name] for record in records))]
            for name in dict.fromkeys(name for name, _ in records[0])}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", metavar="BATCHxN", type=shape, action="append", help="may be repeated; default: the ranked shapes and single matrices")
    parser.add_argument("--calls", type=int, default=5)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.exit(1, "stages.py: torch sees no CUDA device\n")
    table = rich.table.Table(title=torch.cuda.get_device_name(), title_justify="left", box=rich.box.SIMPLE_HEAD)
    for name in ("batch x n", "kernel", "launches", "us a call", "first", "second", "third", "GB/s", "TFLOP/s"):
        table.add_column(name, justify="left" if name == "kernel" else "right", no_wrap=True)
    for batch, n in options.shape or map(shape, SHAPES):
        route = plan_for(torch.empty(1, device="cuda").expand(batch, n, n))
        if route.backend == "geqrf":
            table.add_row(f"{batch} x {n}", "torch.geqrf")
            continue
        A = matrices(batch, n)
        for i, (name, times) in enumerate(stages(lambda: custom_kernel(A), options.calls).items()):
            gbs = tflops = ""
            if name == "larfb_kernel":
                panels = next(step.panels for step in route.steps if step.panels)
                c = batch * n * (n - PANEL * panels)
                gbs, tflops = f"{8 * c / times[0] / 1e3:.0f}", f"{3 * 4 * PANEL * panels * c / times[0] / 1e6:.0f}"
            three = [f"{time:.1f}" for time in times[:3]] + ["", "", ""]
            table.add_row(f"{batch} x {n}" if i == 0 else "", name, str(len(times)), f"{sum(times):.1f}", *three[:3], gbs, tflops)
    console = rich.console.Console()
    console.width = max(console.width, 110)
    console.print(table)


if __name__ == "__main__":
    main()
