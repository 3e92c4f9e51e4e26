"""Times panels and updates alone on a GPU, from the profiler's record of single launches.

    python benchmarks/kernels.py [--calls 5] [--rows M ...]

Panels: M rows of one matrix and of as many as there are multiprocessors, 64 columns and a pair's 128 (the second updated by the first), from
their Gram matrices. Updates: V of 64 and 128 columns on the columns right of it, square matrices of M rows. GB/s of C count one reading and one writing, TFLOP/s
the three products of the 3-split; both also as shares of what an H200 reached in plain copies and products of bf16 (BOUNDS). Medians
over the calls; L2 is cleared before each.
"""
import argparse

import rich.console
import rich.table
import torch
from stages import matrices, stages
from submission import PANEL, SINGLE, WHOLE, Choice, Plan, Step, _flat, choose_backend, larfb_shape, plan

ROWS = (128, 256, 512, 1024, 2048, 4096)
BATCHES = (1, 8, 60, 640)
BOUNDS = 4.3e12, 790e12      # bytes/s and FLOP/s, measured on an H200
MOST_BYTES = 8 << 30         # of A


def first_panels(batch: int, rows: int, choice: Choice) -> tuple[Step, Step]:
    """The first two panels of `batch` matrices of `rows` rows as `plan` would have them, without updates; the last block where there is no second."""
    panels = plan(batch, rows, choice.info, choice.name).steps[:-1] or (Step(SINGLE, 0, 8, 1, 1, 1),)
    alone = [Step(*step[:6]) for step in panels]
    return alone[0], alone[1] if len(alone) > 1 else Step(WHOLE, PANEL, 4 * -(-(rows - PANEL) // 16), 1)


def updating(batch: int, rows: int, width: int, choice: Choice) -> tuple[Step, Step] | None:
    """The same two with the update by `width` columns, 64 or 128, after the first or the second. None: there is no such update."""
    steps = list(first_panels(batch, rows, choice))
    last = width // PANEL - 1
    if rows <= width or steps[last].kind == WHOLE:
        return None
    _, shape = larfb_shape(batch, rows, last + 1, -(-rows // PANEL) - last - 1, choice.info.multiprocessors, choice.info, choice.name)
    steps[last] = Step(*steps[last][:6], last + 1, *shape)
    return tuple(steps)


def run(A: torch.Tensor, steps: tuple[Step, ...], choice: Choice, calls: int) -> dict[str, list[float]]:
    """Kernel -> microseconds of each launch of these steps alone."""
    flat = _flat(Plan(choice.name, steps))
    return stages(lambda: choice.extension.geqrf(A, flat), calls)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=5)
    parser.add_argument("--rows", type=int, action="append", help=f"may be repeated; default: {', '.join(map(str, ROWS))}")
    options = parser.parse_args()
    if options.rows and min(options.rows) < 2 * PANEL:
        parser.error(f"--rows: expected at least {2 * PANEL}, got {min(options.rows)}")
    if not torch.cuda.is_available():
        parser.exit(1, "kernels.py: torch sees no CUDA device\n")
    choice = choose_backend(torch.cuda.current_device())
    if choice.extension is None:
        parser.exit(1, f"kernels.py: no kernels here: {choice.reason}\n")
    panels = rich.table.Table(title=f"{torch.cuda.get_device_name()}: panels", title_justify="left", box=rich.box.SIMPLE_HEAD)
    updates = rich.table.Table(title="updates", title_justify="left", box=rich.box.SIMPLE_HEAD)
    for name in ("rows", "batch", "columns", "us", "us a column"):
        panels.add_column(name, justify="right")
    for name in ("rows", "batch", "columns of V", "us", "GB/s", "of the bound", "TFLOP/s", "of the bound"):
        updates.add_column(name, justify="right")
    for rows in options.rows or ROWS:
        for batch in (1, choice.info.multiprocessors):
            times = run(matrices(batch, rows), first_panels(batch, rows, choice), choice, options.calls)["panel_kernel"]
            for width in (PANEL, 2 * PANEL)[:len(times)]:
                us = sum(times[:width // PANEL])
                panels.add_row(str(rows), str(batch), str(width), f"{us:.1f}", f"{us / width:.2f}")
        for batch in BATCHES:
            if 4 * batch * rows * rows > MOST_BYTES:
                continue
            A = matrices(batch, rows)
            for width in (PANEL, 2 * PANEL):
                steps = updating(batch, rows, width, choice)
                if not steps:
                    continue
                us = run(A, steps, choice, options.calls)["larfb_kernel"][0]
                entries = batch * rows * (rows - width)
                rates = 8 * entries / us * 1e6, 12 * width * entries / us * 1e6
                shares = [f"{100 * rate / bound:.0f} %" for rate, bound in zip(rates, BOUNDS)]
                updates.add_row(str(rows), str(batch), str(width), f"{us:.1f}", f"{rates[0] / 1e9:.0f}", shares[0], f"{rates[1] / 1e12:.0f}", shares[1])
    console = rich.console.Console()
    console.width = max(console.width, 110)
    console.print(panels)
    console.print(updates)


if __name__ == "__main__":
    main()
