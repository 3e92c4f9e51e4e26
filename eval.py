"""Runs `submission.custom_kernel`: as the board does, or side by side with torch.geqrf.

    python eval.py [options]               local: compare, print a table, exit status 1 if any case fails (see --help)
    POPCORN_FD=N eval.py MODE CASEFILE     board: modes test, benchmark, leaderboard, profile; `key: value` lines to N

Cases:        parse_case, read_cases
Timing:       make_inputs, judge, time_calls
Board:        run_test, run_benchmark, run_profile (in the worker); report_tests, report_benchmarks, report_profile; board_main
Local:        compare, local_main
Presentation: with_progress, print_table, print_summary, write_json

Exit statuses, board: 0, 2 (usage), 111 (no POPCORN_FD), 112 (a case failed), 113 (case file unreadable).
Exit statuses, local: 0, 1 (a case failed), 2 (usage).
"""
import argparse
import contextlib
import datetime
import json
import math
import multiprocessing
import os
import re
import subprocess
import sys
import time
import traceback
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path

import torch

from reference import CASES, Figures, generate_input, measure
from task import TestSpec

HERE = Path(__file__).resolve().parent
BOARDS = ("qr", "qr_v2", "stress")
L2_BYTES = 256 << 20      # overwritten before every repeat, so that each starts with a cold L2
INPUT_BYTES = 256 << 20   # inputs of about this size together are factored between two events ...
MAX_INPUTS = 50           # ... but no more than this many
SEED_STEP = 42            # between the inputs of one case
SLOW_CALL_NS = 1e8        # a baseline call over 0.1 s is timed once
CPU_SPECS = ("batch: 20; n: 32; cond: 1; seed: 43214", "batch: 4; n: 176; cond: 1; seed: 423011",
             "batch: 4; n: 128; cond: 2; seed: 770001; case: mixed", "batch: 1; n: 352; cond: 1; seed: 123456")

# ---------------------------------------------------------------------------------------------------------------------
# Cases
# ---------------------------------------------------------------------------------------------------------------------


class InputError(ValueError):
    """A case or an option that cannot be used; the message names the file, line and key, or the option."""


@dataclass(frozen=True)
class Case:
    spec: str       # the line as written
    args: TestSpec  # keyword arguments of generate_input

    @property
    def kind(self) -> str:
        return self.args.get("case", "dense")


def parse_case(text: str, where: str) -> Case:
    """Case from `key: value; key: value`; `where` (file and line, or option) opens the message of an InputError."""
    args = {}
    for part in text.split(";"):
        key, colon, value = (x.strip() for x in part.partition(":"))
        if not colon:
            raise InputError(f"{where}: expected 'key: value', got {part.strip()!r}")
        if key not in ("batch", "n", "cond", "seed", "case"):
            raise InputError(f"{where}: unknown key {key!r}; the keys are batch, n, cond, seed and case")
        if key in args:
            raise InputError(f"{where}: key {key!r} is given twice")
        if key == "case":
            if value not in CASES:
                raise InputError(f"{where}: key 'case' has the unknown value {value!r}; expected one of {', '.join(CASES)}")
            args[key] = value
            continue
        if not re.fullmatch(r"-?[0-9]+", value):
            raise InputError(f"{where}: key {key!r} needs an integer, got {value!r}")
        args[key] = int(value)
        least = {"batch": 1, "n": 1, "cond": 0}.get(key)
        if least is not None and args[key] < least:
            raise InputError(f"{where}: key {key!r} must be at least {least}, got {value}")
    for key in ("batch", "n", "cond", "seed"):
        if key not in args:
            raise InputError(f"{where}: key {key!r} is missing")
    return Case(text.strip(), args)


def read_cases(path: str | Path) -> list[Case]:
    """The cases of a file, one a line, blank lines skipped. Raises InputError for a file without cases too."""
    try:
        lines = Path(path).read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from None
    cases = [parse_case(line, f"{path}, line {i}") for i, line in enumerate(lines, 1) if line.strip()]
    if not cases:
        raise InputError(f"{path}: holds no case")
    return cases


# ---------------------------------------------------------------------------------------------------------------------
# Timing, by the board's rule
# ---------------------------------------------------------------------------------------------------------------------


class CheckFailed(Exception):
    """An output that the judge refused."""


@dataclass(frozen=True)
class StopRule:
    repeats: int    # never more than this many
    seconds: float  # stop once mean time per call x repeats passes this


BENCHMARK = StopRule(200, 10.0)
LEADERBOARD = StopRule(1000, 30.0)
QUICK = StopRule(5, 1.0)
BASELINE = StopRule(10, 10.0)
ONCE = StopRule(1, 0.0)


@dataclass(frozen=True)
class Timing:
    """Statistics of the time per call over the repeats, in nanoseconds; err is the standard error of the mean."""
    runs: int
    mean: float
    std: float
    err: float
    best: float
    worst: float


def timing_of(times: list[float]) -> Timing:
    runs, mean = len(times), sum(times) / len(times)
    std = math.sqrt(sum((t - mean) ** 2 for t in times) / (runs - 1)) if runs > 1 else 0.0
    return Timing(runs, mean, std, std / math.sqrt(runs), min(times), max(times))


def make_inputs(args: TestSpec, device=None) -> list[torch.Tensor]:
    """What one repeat factors: the case's own input first, then inputs with the seed raised by SEED_STEP each."""
    count = min(max(INPUT_BYTES // (4 * args["batch"] * args["n"] ** 2), 1), MAX_INPUTS)
    return [generate_input(**{**args, "seed": args["seed"] + SEED_STEP * i}, device=device) for i in range(count)]


def judge(data: torch.Tensor, original: torch.Tensor, output) -> Figures:
    """Figures of an output for `data`, which must still equal `original`; a changed input is a problem of the output."""
    if not torch.equal(data, original):
        return Figures(problem="the input was changed")
    return measure(data, output)


def require(figures: Figures) -> None:
    if not figures.ok:
        raise CheckFailed(figures.message)


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def time_calls(kernel, inputs: list[torch.Tensor], rule: StopRule, check=None) -> tuple[Timing, list]:
    """Time `[kernel(x) for x in inputs]`, divided by their number, until the rule stops it.

    Returns the timing and the last repeat's outputs; check(outputs) runs after every repeat, outside the timed part.
    On the CPU there is no L2 to clear and the clock is the host's."""
    device, times, begun = inputs[0].device, [], time.monotonic()
    cuda = device.type == "cuda"
    if cuda:
        scratch = torch.empty(L2_BYTES, dtype=torch.uint8, device=device)
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    while len(times) < rule.repeats:
        outputs = None  # two repeats' outputs need not be alive together
        if cuda:
            torch.cuda.synchronize(device)
            scratch.zero_()
            start.record()
            outputs = [kernel(x) for x in inputs]
            end.record()
            torch.cuda.synchronize(device)
            taken = start.elapsed_time(end) * 1e6
        else:
            before = time.perf_counter_ns()
            outputs = [kernel(x) for x in inputs]
            taken = time.perf_counter_ns() - before
        times.append(taken / len(inputs))
        if check:
            check(outputs)
        spent = time.monotonic() - begun
        if len(times) >= 3 and spent >= 0.1:
            timing = timing_of(times)
            if timing.err < 0.001 * timing.mean or timing.mean * timing.runs > rule.seconds * 1e9 or spent > 120:
                break
    return timing_of(times), outputs


# ---------------------------------------------------------------------------------------------------------------------
# Board protocol: the worker's side. Each returns (ok, message or Timing); no exception leaves the worker.
# ---------------------------------------------------------------------------------------------------------------------


def one_line(text) -> str:
    return " ".join(str(text).split())


def guarded(work):
    """work(custom_kernel) -> (ok, result); whatever it raises becomes (False, one line), the traceback goes to standard error.

    SystemExit counts: passed on, it would end the evaluation with the submission's own exit status."""
    try:
        from submission import custom_kernel
        return work(custom_kernel)
    except CheckFailed as error:
        return False, str(error)
    except (Exception, SystemExit) as error:
        traceback.print_exc()
        return False, one_line(f"{type(error).__name__}: {error}")


def run_test(args: TestSpec):
    """One checked call: (ok, message)."""
    def work(kernel):
        data = generate_input(**args)
        original = data.clone()
        output = kernel(data)
        synchronize(data.device)
        figures = judge(data, original, output)
        return figures.ok, figures.message
    return guarded(work)


def run_benchmark(args: TestSpec, rule: StopRule):
    """A checked call on clones, then timed repeats, each checked: (True, Timing) or (False, message)."""
    def work(kernel):
        inputs = make_inputs(args)
        originals = [x.clone() for x in inputs]

        def check(outputs, given=inputs):
            for data, original, output in zip(given, originals, outputs):
                require(judge(data, original, output))

        clones = [x.clone() for x in inputs]
        check([kernel(x) for x in clones], clones)
        del clones
        return True, time_calls(kernel, inputs, rule, check)[0]
    return guarded(work)


def run_profile(args: TestSpec):
    """A checked call to warm up, then one under an NVTX range: (ok, message)."""
    def work(kernel):
        data = generate_input(**args)
        original = data.clone()
        figures = judge(data, original, kernel(data))
        if figures.ok:
            synchronize(data.device)
            with torch.cuda.nvtx.range("custom_kernel") if data.is_cuda else contextlib.nullcontext():
                output = kernel(data)
                synchronize(data.device)
            figures = judge(data, original, output)
        return figures.ok, figures.message
    return guarded(work)


# ---------------------------------------------------------------------------------------------------------------------
# Board protocol: the parent's side
# ---------------------------------------------------------------------------------------------------------------------


class Worker:
    """One spawned process that runs every case. A worker that dies is a failure of the case that it was given."""

    def __init__(self):
        self.pool = ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn"))

    def __call__(self, function, *args):
        try:
            return self.pool.submit(function, *args).result()
        except BrokenProcessPool:
            return False, "the worker process died"


def report_tests(log, worker, cases) -> bool:
    log("test-count", len(cases))
    passed = True
    for i, case in enumerate(cases):
        log(f"test.{i}.spec", case.spec)
        ok, message = worker(run_test, case.args)
        log(f"test.{i}.status", "pass" if ok else "fail")
        log(f"test.{i}.message" if ok else f"test.{i}.error", message)
        passed &= ok
    return passed


def report_benchmarks(log, worker, cases, ranked=False) -> bool:
    """Ranked: every case is warmed first, and the first failure ends the run."""
    log("benchmark-count", len(cases))
    passed = True

    def report_failure(i, message):
        log(f"benchmark.{i}.status", "fail")
        log(f"benchmark.{i}.error", message)

    if ranked:
        for i, case in enumerate(cases):
            ok, result = worker(run_benchmark, case.args, ONCE)
            if not ok:
                log(f"benchmark.{i}.spec", case.spec)
                report_failure(i, result)
                return False
    for i, case in enumerate(cases):
        log(f"benchmark.{i}.spec", case.spec)
        ok, result = worker(run_benchmark, case.args, LEADERBOARD if ranked else BENCHMARK)
        if ok:
            for key in ("runs", "mean", "std", "err", "best", "worst"):
                log(f"benchmark.{i}.{key}", getattr(result, key))
            continue
        report_failure(i, result)
        passed = False
        if ranked:
            break
    return passed


def report_profile(log, worker, cases) -> bool:
    """The file's first case."""
    log("profile.0.spec", cases[0].spec)
    ok, message = worker(run_profile, cases[0].args)
    log("profile.0.status", "pass" if ok else "fail")
    log("profile.0.message" if ok else "profile.0.error", message)
    return ok


MODES = {
    "test": report_tests,
    "benchmark": report_benchmarks,
    "leaderboard": lambda log, worker, cases: report_benchmarks(log, worker, cases, ranked=True),
    "profile": report_profile,
}


def fold_seed(seed: int, secret: int) -> int:
    """The seed of a case on the board: Cantor's pairing of the case's own with the secret one, plus the case's own."""
    total = seed + secret
    return seed + total * (total + 1) // 2


def board_main(argv: list[str]) -> int:
    """`eval.py MODE CASEFILE` with POPCORN_FD; returns the exit status."""
    if "POPCORN_FD" not in os.environ:
        return complain("POPCORN_FD is not set: the board's modes write their results to that file descriptor", 111)
    if len(argv) != 2 or argv[0] not in MODES:
        return complain(f"usage with POPCORN_FD set: eval.py {'|'.join(MODES)} CASEFILE", 2)
    try:
        out = os.fdopen(int(os.environ["POPCORN_FD"]), "w", encoding="utf-8")
    except (ValueError, OSError) as error:
        return complain(f"POPCORN_FD={os.environ['POPCORN_FD']} is no open file descriptor: {error}", 111)
    secret = os.environ.pop("POPCORN_SEED", "")  # popped: the worker runs the submission and must not see it
    if secret and not re.fullmatch(r"-?[0-9]+", secret):
        return complain("POPCORN_SEED is no integer", 2)
    try:
        cases = read_cases(argv[1])
    except InputError as error:
        return complain(error, 113)
    if secret:
        cases = [Case(c.spec, {**c.args, "seed": fold_seed(c.args["seed"], int(secret))}) for c in cases]

    def log(key, value):
        out.write(f"{key}: {one_line(value)}\n")
        out.flush()

    worker = Worker()
    with out, worker.pool:
        passed = MODES[argv[0]](log, worker, cases)
        log("check", "pass" if passed else "fail")
    return 0 if passed else 112


def complain(message, status: int) -> int:
    print(f"eval.py: {one_line(message)}", file=sys.stderr)
    return status


# ---------------------------------------------------------------------------------------------------------------------
# Local comparison
# ---------------------------------------------------------------------------------------------------------------------

PROTOCOL = ("milliseconds per call, mean over at most {repeats} repeats; a repeat is clamp(256 MiB // bytes of an input, 1, 50) calls "
            "between two events, L2 cleared before it by overwriting 256 MiB; torch.geqrf the same, at most 10 repeats, or one call where "
            "that takes over 0.1 s; residuals in n * eps32, the worst matrix of the last repeat's outputs")


def compare(case: Case, device: torch.device, rule: StopRule, timed: bool) -> dict:
    """One row: both times (timed) and the figures of every output checked. Exceptions end the row and are named in `message`."""
    args = case.args
    row = dict(batch=args["batch"], n=args["n"], case=case.kind, cond=args["cond"], seed=args["seed"], custom_ms=None,
               geqrf_ms=None, ratio=None, factor=None, orthogonality=None, columnwise=None, backend=None, ok=False, message="")
    try:
        import submission
        inputs = make_inputs(args, device) if timed else [generate_input(**args, device=device)]
        originals = [x.clone() for x in inputs]
        outputs = [submission.custom_kernel(x) for x in inputs]
        plan_for = getattr(submission, "plan_for", None)  # a board submission need not have it
        row["backend"] = plan_for(inputs[0]).backend if plan_for else "unknown"
        note_figures(row, inputs, originals, outputs)
        if not timed:
            row["ok"] = True
            return row
        del outputs  # its memory is what the first timed repeat takes again
        timing, outputs = time_calls(submission.custom_kernel, inputs, rule)
        note_figures(row, inputs, originals, outputs)
        del outputs, originals
        row["custom_ms"] = timing.mean / 1e6
        row["geqrf_ms"] = time_baseline(inputs, rule).mean / 1e6
        row["ratio"] = row["geqrf_ms"] / row["custom_ms"]
        row["ok"] = True
    except CheckFailed as error:
        row["message"] = str(error)
    except (Exception, SystemExit) as error:
        row["message"] = one_line(f"{type(error).__name__}: {error}")
    return row


def note_figures(row: dict, inputs, originals, outputs) -> None:
    """Put the worst figures of these outputs into the row; raises CheckFailed at the first output that fails."""
    figures = [judge(*triple) for triple in zip(inputs, originals, outputs)]
    for name in ("factor", "orthogonality", "columnwise"):
        row[name] = max((getattr(f, name) for f in figures), key=lambda x: math.inf if math.isnan(x) else x)
    for i, f in enumerate(figures):
        if not f.ok:
            raise CheckFailed(f.message if len(figures) == 1 else f"input {i} of {len(figures)}: {f.message}")


def time_baseline(inputs: list[torch.Tensor], rule: StopRule) -> Timing:
    """torch.geqrf by the same rule, but at most 10 repeats; one call on one input where that takes over 0.1 s."""
    torch.geqrf(inputs[0])  # the first call of a process also sets up the library
    probe, _ = time_calls(torch.geqrf, inputs[:1], ONCE)
    if probe.mean > SLOW_CALL_NS:
        return probe
    time_calls(torch.geqrf, inputs, ONCE)  # warms the allocator, as the checked call does for custom_kernel
    return time_calls(torch.geqrf, inputs, min(rule, BASELINE, key=lambda r: r.repeats))[0]


def local_cases(options, device: torch.device) -> tuple[list[Case], list[Case]]:
    """(cases to compare, cases to check only) that the options ask for, each once. Raises InputError."""
    named = options.board or options.cases or options.case
    if not named and device.type == "cpu":
        timed = [parse_case(spec, "built-in CPU cases") for spec in CPU_SPECS]
    else:
        boards = BOARDS if options.board == "all" else (options.board,) if options.board else () if named else ("qr",)
        timed = [case for board in boards for case in read_cases(HERE / "cases" / f"{board}.benchmarks.txt")]
    timed += [case for path in options.cases for case in read_cases(path)]
    timed += [parse_case(text, f"--case {text!r}") for text in options.case]

    tests = []
    if options.tests:
        boards = ("qr", "qr_v2") if options.board == "all" else (options.board or "qr",)
        tests = [case for board in boards for case in read_cases(HERE / "cases" / f"{board}.tests.txt")]

    def once(cases):  # the boards share cases
        return list({tuple(sorted({"case": "dense", **case.args}.items())): case for case in cases}.values())
    return once(timed), once(tests)


def local_main(argv: list[str]) -> int:
    """The local command line; returns the exit status."""
    options = parse_options(argv)
    try:
        device = local_device(options.device)
        timed, tests = local_cases(options, device)
        if options.json and (Path(options.json).is_dir() or not Path(options.json).resolve().parent.is_dir()):
            raise InputError(f"--json {options.json}: no file can be written there")
    except InputError as error:
        return complain(error, 2)

    if device.type == "cpu":
        print("On the CPU custom_kernel is torch.geqrf: this run shows that everything works, not how fast the kernels are."
              if options.device == "cpu" else
              "No CUDA device here, so custom_kernel is torch.geqrf: this run shows that everything works, not how fast the kernels are.")
    else:
        print(f"{torch.cuda.get_device_name(device)}, torch {torch.__version__}")
    rule = QUICK if options.quick or device.type == "cpu" else BENCHMARK

    rows, test_rows = [], []
    for case, target in with_progress([(c, rows) for c in timed] + [(c, test_rows) for c in tests]):
        target.append(compare(case, device, rule, timed=target is rows))
        if device.type == "cuda":
            torch.cuda.empty_cache()  # the cases' sizes differ: what one leaves behind fits no other

    print_table("custom_kernel and torch.geqrf", rows)
    if test_rows:
        print_table("test cases, checked only", test_rows)
    if options.json:
        write_json(options.json, device, rule, rows, test_rows)
    print_summary(rows, test_rows)
    return 0 if all(row["ok"] for row in rows + test_rows) else 1


def parse_options(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="eval.py", description="Compare submission.custom_kernel with torch.geqrf: times by the board's rule, and how exact.",
        epilog="A case is 'batch: 4; n: 300; cond: 1; seed: 7; case: band'; case is one of " + ", ".join(CASES) + ".")
    parser.add_argument("--board", choices=(*BOARDS, "all"), help="benchmark cases to run (default: qr; a small set without CUDA)")
    parser.add_argument("--tests", action="store_true", help="also check that board's test cases (stress has none)")
    parser.add_argument("--cases", metavar="FILE", action="append", default=[], help="cases from a file, one a line")
    parser.add_argument("--case", metavar="CASE", action="append", default=[], help="one more case; may be repeated")
    parser.add_argument("--device", help="cuda, cuda:1, cpu (default: cuda where there is one)")
    parser.add_argument("--quick", action="store_true", help=f"at most {QUICK.repeats} repeats a case")
    parser.add_argument("--json", metavar="FILE", help="also write the rows and the machine's description")
    options = parser.parse_args(argv)
    if options.tests and options.board == "stress":
        parser.error("--tests: the stress board has no test cases")
    return options


def local_device(name: str | None) -> torch.device:
    """The device to run on, made current if it is a CUDA one. Raises InputError if it is not there."""
    available = torch.cuda.is_available()
    try:
        device = torch.device(name or ("cuda" if available else "cpu"))
    except RuntimeError:
        raise InputError(f"--device {name}: no such device; expected cuda, cuda:N or cpu") from None
    if device.type not in ("cuda", "cpu"):
        raise InputError(f"--device {name}: expected cuda, cuda:N or cpu")
    if device.type == "cpu":
        return torch.device("cpu")
    if not available:
        raise InputError(f"--device {name}: torch {torch.__version__} sees no CUDA device")
    index = torch.cuda.current_device() if device.index is None else device.index
    if index >= torch.cuda.device_count():
        raise InputError(f"--device {name}: torch sees {torch.cuda.device_count()} CUDA device(s)")
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


# ---------------------------------------------------------------------------------------------------------------------
# Presentation
# ---------------------------------------------------------------------------------------------------------------------

TABLE_WIDTH = 128  # the full table; a narrower terminal wraps lines rather than lose figures


def load_rich():
    """The rich package, or None where it is missing: then everything is printed as plain lines."""
    try:
        import rich.console
        import rich.progress
        import rich.table
        return rich
    except ImportError:
        return None


def with_progress(jobs):
    """Yield the (case, ...) jobs while a bar on standard error advances; a line each where rich is missing."""
    rich = load_rich()
    if rich is None:
        print("rich is not installed: plain output (pip install rich)", file=sys.stderr)
        for i, job in enumerate(jobs, 1):
            print(f"[{i}/{len(jobs)}] {job[0].spec}", file=sys.stderr, flush=True)
            yield job
        return
    console = rich.console.Console(stderr=True)
    with rich.progress.Progress(console=console, transient=True, redirect_stdout=False, redirect_stderr=False) as bar:
        task = bar.add_task("", total=len(jobs))
        for job in jobs:
            bar.update(task, description=job[0].spec)
            yield job
            bar.advance(task)


def number(value, digits=3) -> str:
    """A figure in as many digits as it deserves; '-' where it was not taken."""
    if value is None or math.isnan(value):
        return "-"
    return f"{value:.{max(0, digits - 1 - math.floor(math.log10(value)))}f}" if 1e-4 <= value < 1e6 else f"{value:.{digits}g}"


COLUMNS = {
    "batch": lambda r: str(r["batch"]),
    "n": lambda r: str(r["n"]),
    "case": lambda r: r["case"],
    "custom ms": lambda r: number(r["custom_ms"]),
    "geqrf ms": lambda r: number(r["geqrf_ms"]),
    "speed-up": lambda r: number(r["ratio"]),
    "factor": lambda r: number(r["factor"]),
    "orthog.": lambda r: number(r["orthogonality"]),
    "columnwise": lambda r: number(r["columnwise"]),
    "backend": lambda r: r["backend"] or "-",
    "verdict": lambda r: "pass" if r["ok"] else "FAIL",
}


def print_table(title: str, rows: list[dict]) -> None:
    """A line per row; residuals in n eps (factor may be 20, orthog. 100)."""
    title += "; residuals in n eps, limits 20 (factor) and 100 (orthog.)"
    rich = load_rich()
    if rich is None:
        cells = [list(COLUMNS)] + [[show(row) for show in COLUMNS.values()] for row in rows]
        widths = [max(map(len, column)) for column in zip(*cells)]
        print(title, *("  ".join(map(str.rjust, line, widths)) for line in cells), sep="\n", flush=True)
        return
    table = rich.table.Table(title=title, title_justify="left", box=rich.box.SIMPLE_HEAD, padding=(0, 1))
    for name in COLUMNS:
        table.add_column(name, justify="left" if name in ("case", "backend", "verdict") else "right", no_wrap=True)
    for row in rows:
        table.add_row(*(show(row) for show in COLUMNS.values()), style=None if row["ok"] else "bold red")
    console = rich.console.Console()
    console.width = max(console.width, TABLE_WIDTH)
    console.print(table)


def geometric_mean(values: list[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values))


def print_summary(rows: list[dict], test_rows: list[dict]) -> None:
    """Each failure with its reason, the verdict over everything, and last the geometric means over the cases that passed."""
    everything = rows + test_rows
    failed = [row for row in everything if not row["ok"]]
    for row in failed:
        print(f"FAIL batch: {row['batch']}; n: {row['n']}; cond: {row['cond']}; seed: {row['seed']}; case: {row['case']}: {row['message']}")
    print(f"verdict: {len(failed)} of {len(everything)} cases FAIL" if failed else f"verdict: all {len(everything)} cases pass")
    good = [row for row in rows if row["ok"]]
    if good:
        custom, geqrf, ratio = (geometric_mean([row[key] for row in good]) for key in ("custom_ms", "geqrf_ms", "ratio"))
        left_out = f", {len(rows) - len(good)} failed left out" if len(good) < len(rows) else ""
        print(f"geometric means over {len(good)} cases{left_out}: custom {number(custom)} ms, geqrf {number(geqrf)} ms, "
              f"ratio {number(ratio)}")


def command_output(*command: str) -> str | None:
    """First line of a command's output, None where it is missing, fails or prints nothing."""
    try:
        done = subprocess.run(command, cwd=HERE, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip().partition("\n")[0] or None


def write_json(path: str, device: torch.device, rule: StopRule, rows: list[dict], test_rows: list[dict]) -> None:
    """The rows beside what they were measured on. Figures that are not finite become null: JSON has no NaN."""
    def clean(row):
        return {key: None if isinstance(value, float) and not math.isfinite(value) else value for key, value in row.items()}

    cuda = device.type == "cuda"
    commit = command_output("git", "rev-parse", "HEAD")
    if commit and command_output("git", "status", "--porcelain", "--untracked-files=no"):
        commit += "+changes"
    record = dict(
        device=torch.cuda.get_device_name(device) if cuda else "cpu",
        capability=".".join(map(str, torch.cuda.get_device_capability(device))) if cuda else None,
        driver=command_output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader") if cuda else None,
        torch=torch.__version__,
        cuda=torch.version.cuda,
        date=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        commit=commit,
        protocol=PROTOCOL.format(repeats=rule.repeats),
        rows=[clean(row) for row in rows],
        tests=[clean(row) for row in test_rows])
    Path(path).write_text(json.dumps(record, indent=1) + "\n")


def main(argv: list[str]) -> int:
    """Board protocol if POPCORN_FD is set or a board mode is named, else the local command line."""
    if "POPCORN_FD" in os.environ or argv[:1] and argv[0] in MODES:
        return board_main(argv)
    return local_main(argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
