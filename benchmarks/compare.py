"""Times several versions of submission.py beside each other on a GPU, by the board's rule.

    python benchmarks/compare.py [--shape 640x512 ...] [--case dense] [--rounds 5] [--json FILE] FILE [FILE ...]

Per shape (batch x n): milliseconds a call of each file, and each later file's time as a share of the first's. Rounds alternate between
the files, each of at most 5 repeats (eval.py --quick); the figures are medians over the rounds. Every file's output is judged first.
A version from the history: git show COMMIT:submission.py > build/COMMIT.py.
"""
import argparse
import importlib.util
import json
import math
import statistics
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import rich.console
import rich.table
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from eval import QUICK, make_inputs, require, time_calls  # noqa: E402
from reference import CASES, measure  # noqa: E402
from stages import shape  # noqa: E402

SHAPES = ("20x32", "40x176", "40x352", "640x512", "60x1024", "8x2048", "2x4096")


def load(path: str, number: int):
    """The module in `path`, under a name of its own."""
    spec = importlib.util.spec_from_file_location(f"version{number}", path)
    if not spec:
        raise SystemExit(f"compare.py: {path} is no Python file")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def compare(modules: list, batch: int, n: int, case: str, rounds: int) -> list[float]:
    """Milliseconds a call of each module: medians over the rounds. Raises CheckFailed at the first output that is not right."""
    inputs = make_inputs(dict(batch=batch, n=n, cond=1, seed=n, case=case), torch.device("cuda"))
    for module in modules:
        require(measure(inputs[0], module.custom_kernel(inputs[0])))
    times = [[time_calls(module.custom_kernel, inputs, QUICK)[0].mean / 1e6 for module in modules] for _ in range(rounds)]
    return [statistics.median(column) for column in zip(*times)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", metavar="FILE", nargs="+")
    parser.add_argument("--shape", metavar="BATCHxN", type=shape, action="append", help="may be repeated; default: the ranked shapes")
    parser.add_argument("--case", choices=CASES, default="dense")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", metavar="FILE", help="write the table there too")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.exit(1, "compare.py: torch sees no CUDA device\n")
    modules = [load(path, number) for number, path in enumerate(options.files)]
    with ThreadPoolExecutor() as pool:                                       # all compile at the same time
        list(pool.map(lambda module: module.build(module.candidates(torch.cuda.get_device_capability())[0], torch.cuda.get_device_capability()), modules))
    names = [Path(path).stem for path in options.files]
    table = rich.table.Table(title=f"{torch.cuda.get_device_name()}, {options.case}, ms a call", title_justify="left", box=rich.box.SIMPLE_HEAD)
    for name in ("batch x n", *names, *(f"{name} / {names[0]}" for name in names[1:])):
        table.add_column(name, justify="right")
    rows = []
    for batch, n in options.shape or map(shape, SHAPES):
        times = compare(modules, batch, n, options.case, options.rounds)
        rows.append(times)
        table.add_row(f"{batch} x {n}", *(f"{time:.4g}" for time in times), *(f"{time / times[0]:.3f}" for time in times[1:]))
        if options.json:
            Path(options.json).write_text(json.dumps(dict(files=options.files, shapes=[f"{b}x{k}" for b, k in options.shape or map(shape, SHAPES)], ms=rows)))
    means = [math.exp(statistics.fmean(map(math.log, column))) for column in zip(*rows)]
    table.add_row("geometric mean", *(f"{mean:.4g}" for mean in means), *(f"{mean / means[0]:.3f}" for mean in means[1:]))
    console = rich.console.Console()
    console.width = max(console.width, 60 + 24 * len(names))
    console.print(table)


if __name__ == "__main__":
    main()
