"""eval.py driven from outside: the board's protocol through a pipe, the local command line, and the timing rule itself."""
import json
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import eval as evaluation
from eval import InputError, parse_case, read_cases, timing_of

ROOT = Path(evaluation.__file__).resolve().parent
SMALL = "batch: 2; n: 9; cond: 1; seed: 5"
OTHER = "batch: 3; n: 12; cond: 0; seed: 6; case: rankdef"
GOOD = "def custom_kernel(data):\n    return tuple(torch.geqrf(data))\n"
WRONG = "def custom_kernel(data):\n    H, tau = torch.geqrf(data)\n    if data.shape[1] == 12:\n        H = H * 1.01\n    return H, tau\n"


@pytest.fixture
def board(tmp_path):
    """A folder as on the board, with a submission of the test's own, and a way to run eval.py in it."""
    for name in ("eval.py", "reference.py", "task.py"):
        shutil.copy(ROOT / name, tmp_path)
    shutil.copytree(ROOT / "cases", tmp_path / "cases")

    def run(*arguments, submission=GOOD, cases=None, pipe=True, **environment):
        (tmp_path / "submission.py").write_text("import os, torch\n" + submission)
        if cases is not None:
            (tmp_path / "cases.txt").write_text(cases)
        env = {**os.environ, "CUDA_VISIBLE_DEVICES": "", **environment}
        env.pop("POPCORN_FD", None)
        if not pipe:
            return subprocess.run([sys.executable, "eval.py", *arguments], cwd=tmp_path, env=env, capture_output=True, text=True)
        read, write = os.pipe()
        env["POPCORN_FD"] = str(write)
        done = subprocess.run([sys.executable, "eval.py", *arguments], cwd=tmp_path, env=env, capture_output=True, text=True, pass_fds=(write,))
        os.close(write)
        with os.fdopen(read) as pipe_end:
            lines = [line.rstrip("\n").partition(": ") for line in pipe_end]
        assert all(colon for _, colon, _ in lines), lines
        done.log = {key: value for key, _, value in lines}
        assert len(done.log) == len(lines), "no key twice"
        return done
    return run


# ---------------------------------------------------------------------------------------------------------------------
# Board protocol
# ---------------------------------------------------------------------------------------------------------------------


def test_tests_pass(board):
    done = board("test", "cases.txt", cases=f"{SMALL}\n\n{OTHER}\n")
    assert done.returncode == 0, done.stderr
    assert list(done.log) == ["test-count", "test.0.spec", "test.0.status", "test.0.message", "test.1.spec", "test.1.status", "test.1.message", "check"]
    assert done.log["test-count"] == "2" and done.log["test.0.spec"] == SMALL and done.log["test.1.spec"] == OTHER
    assert done.log["test.0.status"] == done.log["test.1.status"] == done.log["check"] == "pass"
    assert "factor" in done.log["test.0.message"]


def test_one_failing_test_fails_the_check_and_the_rest_still_runs(board):
    done = board("test", "cases.txt", cases=f"{OTHER}\n{SMALL}\n", submission=WRONG)
    assert done.returncode == 112
    assert done.log["test.0.status"] == "fail" and "factor residual of matrix" in done.log["test.0.error"] and "test.0.message" not in done.log
    assert done.log["test.1.status"] == "pass" and done.log["check"] == "fail"


@pytest.mark.parametrize("body, words", [
    ("def custom_kernel(data):\n    raise ValueError('no\\nway')\n", "ValueError: no way"),
    ("def custom_kernel(data):\n    raise SystemExit(0)\n", "SystemExit: 0"),
    ("def custom_kernel(data):\n    os._exit(0)\n", "the worker process died"),
    ("def custom_kernel(data):\n    out = torch.geqrf(data)\n    data.zero_()\n    return tuple(out)\n", "the input was changed"),
    ("def custom_kernel(data):\n    return list(torch.geqrf(data))\n", "expected the tuple (H, tau), got list"),
    ("def wrong_name(data):\n    pass\n", "ImportError"),
    ("import no_such_package\n", "ModuleNotFoundError"),
], ids=["raises", "exits", "dies", "mutates", "list", "no kernel", "no import"])
def test_each_way_to_break_is_a_failed_test(board, body, words):
    done = board("test", "cases.txt", cases=SMALL, submission=body)
    assert done.returncode == 112 and done.log["test.0.status"] == "fail" and words in done.log["test.0.error"] and done.log["check"] == "fail"


def test_benchmark_reports_nanoseconds(board):
    done = board("benchmark", "cases.txt", cases=f"{SMALL}\n{OTHER}\n")
    assert done.returncode == 0, done.stderr
    figures = ("runs", "mean", "std", "err", "best", "worst")
    assert list(done.log) == ["benchmark-count", *[f"benchmark.{i}.{key}" for i in (0, 1) for key in ("spec", *figures)], "check"]
    for i in (0, 1):
        runs, mean, std, err, best, worst = (float(done.log[f"benchmark.{i}.{key}"]) for key in figures)
        assert 3 <= runs <= 200 and 1e3 < best <= mean <= worst < 1e9 and err == pytest.approx(std / math.sqrt(runs))


def test_benchmark_goes_on_after_a_failure_and_leaderboard_stops(board):
    cases = f"{OTHER}\n{SMALL}\n"
    done = board("benchmark", "cases.txt", cases=cases, submission=WRONG)
    assert done.returncode == 112 and done.log["benchmark.0.status"] == "fail" and "factor" in done.log["benchmark.0.error"]
    assert "benchmark.1.mean" in done.log and done.log["check"] == "fail"
    done = board("leaderboard", "cases.txt", cases=f"{SMALL}\n{cases}", submission=WRONG)
    assert done.returncode == 112 and done.log["benchmark.1.status"] == "fail" and done.log["check"] == "fail"
    assert not [key for key in done.log if key.startswith(("benchmark.0.", "benchmark.2."))], "the warm-up found it before anything was timed"


def test_an_output_that_turns_wrong_while_timed_fails(board):
    """Right at the checked call, wrong later: every repeat is checked."""
    late = "calls = 0\ndef custom_kernel(data):\n    global calls\n    calls += 1\n    H, tau = torch.geqrf(data)\n    return (H, tau) if calls <= 60 else (H * 1.01, tau)\n"
    done = board("leaderboard", "cases.txt", cases=SMALL, submission=late.replace("60", "150"))
    assert done.returncode == 112 and "factor residual" in done.log["benchmark.0.error"]


def test_profile(board):
    done = board("profile", "cases.txt", cases=SMALL)
    assert done.returncode == 0 and done.log["profile.0.status"] == "pass" and done.log["check"] == "pass"


def test_secret_seed_changes_the_matrices_and_stays_out_of_the_worker(board):
    """The spec shows the case's own seed; the submission sees neither the secret nor the same numbers."""
    spy = ("def custom_kernel(data):\n    assert 'POPCORN_SEED' not in os.environ\n    raise RuntimeError(f'first {float(data[0, 0, 0]):.6f}')\n")
    plain = board("test", "cases.txt", cases=SMALL, submission=spy)
    folded = board("test", "cases.txt", cases=SMALL, submission=spy, POPCORN_SEED="31")
    assert plain.log["test.0.spec"] == folded.log["test.0.spec"] == SMALL
    seed = 5 + 36 * 37 // 2
    assert evaluation.fold_seed(5, 31) == seed
    for done, expected in ((plain, 5), (folded, seed)):
        a = torch.randn((2, 9, 9), generator=torch.Generator().manual_seed(expected))
        assert f"first {float(a[0, 0, 0]):.6f}" in done.log["test.0.error"]


def test_exit_statuses_before_anything_runs(board, tmp_path):
    assert board("test", "cases.txt", cases=SMALL, pipe=False).returncode == 111
    assert board("test").returncode == 2
    assert board("dance", "cases.txt", cases=SMALL).returncode == 2
    missing = board("test", "absent.txt")
    assert missing.returncode == 113 and "absent.txt: cannot be read" in missing.stderr and missing.log == {}
    for text, words in (("batch: 2; n: x; cond: 1; seed: 1", "key 'n' needs an integer, got 'x'"), ("", "holds no case")):
        done = board("test", "cases.txt", cases=text)
        assert done.returncode == 113 and words in done.stderr
    assert board("test", "cases.txt", cases=SMALL, POPCORN_SEED="many").returncode == 2


def test_a_file_descriptor_that_is_not_open(tmp_path):
    done = subprocess.run([sys.executable, ROOT / "eval.py", "test", "x"], env={**os.environ, "POPCORN_FD": "77"}, capture_output=True, text=True)
    assert done.returncode == 111 and "POPCORN_FD=77" in done.stderr


# ---------------------------------------------------------------------------------------------------------------------
# Local command line
# ---------------------------------------------------------------------------------------------------------------------


def test_local_comparison(board, tmp_path):
    done = board("--case", SMALL, "--case", OTHER, "--quick", "--json", "out.json", pipe=False)
    assert done.returncode == 0, done.stderr
    assert "No CUDA device here, so custom_kernel is torch.geqrf" in done.stdout
    assert "verdict: all 2 cases pass" in done.stdout
    assert done.stdout.rstrip().splitlines()[-1].startswith("geometric means over 2 cases: custom ")
    record = json.loads((tmp_path / "out.json").read_text())
    assert record["device"] == "cpu" and {"capability", "driver", "torch", "cuda", "date", "commit", "protocol"} <= record.keys()
    for row, (batch, n, kind) in zip(record["rows"], ((2, 9, "dense"), (3, 12, "rankdef")), strict=True):
        assert (row["batch"], row["n"], row["case"], row["ok"]) == (batch, n, kind, True)
        assert row["ratio"] == pytest.approx(row["geqrf_ms"] / row["custom_ms"]) and row["custom_ms"] > 0
        assert {"cond", "seed", "factor", "orthogonality", "columnwise", "backend"} <= row.keys()


def test_local_failure_is_an_exit_status_and_a_reason(board):
    done = board("--case", SMALL, "--case", OTHER, "--quick", pipe=False, submission=WRONG)
    assert done.returncode == 1
    assert "verdict: 1 of 2 cases FAIL" in done.stdout and "FAIL batch: 3; n: 12; cond: 0; seed: 6; case: rankdef: " in done.stdout
    assert "geometric means over 1 cases, 1 failed left out" in done.stdout


@pytest.mark.parametrize("arguments, words", [
    (["--case", "batch: 2; n: 0; cond: 1; seed: 1"], "key 'n' must be at least 1, got 0"),
    (["--cases", "absent.txt"], "absent.txt: cannot be read"),
    (["--device", "toaster"], "--device toaster: no such device"),
    (["--device", "cuda"], "--device cuda: torch "),
    (["--json", "no/such/folder/out.json"], "--json no/such/folder/out.json"),
    (["--board", "chess"], "invalid choice"),
    (["--board", "stress", "--tests"], "the stress board has no test cases"),
])
def test_unusable_options_are_named(board, arguments, words):
    done = board(*arguments, pipe=False)
    assert done.returncode == 2 and words in done.stderr and "Traceback" not in done.stderr


def test_default_cases_depend_on_the_device_and_the_board():
    def chosen(*argv, device="cuda"):
        timed, tests = evaluation.local_cases(evaluation.parse_options(list(argv)), torch.device(device))
        return len(timed), len(tests)
    assert chosen() == (7, 0) and chosen(device="cpu") == (len(evaluation.CPU_SPECS), 0)
    assert chosen("--board", "qr_v2", "--tests") == (12, 22)
    assert chosen("--board", "qr", "--tests") == (7, 19)
    assert chosen("--board", "stress") == (2, 0)
    timed, tests = chosen("--board", "all", "--tests")
    assert timed >= 14 and tests >= 22, "each once"
    assert chosen("--case", SMALL) == (1, 0) and chosen("--case", SMALL, "--case", SMALL) == (1, 0)


def test_plain_table_without_rich(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "rich", None)
    row = dict(batch=2, n=9, case="band", custom_ms=0.01234, geqrf_ms=None, ratio=None, factor=math.nan, orthogonality=1.5, columnwise=0.25, backend=None, ok=False)
    evaluation.print_table("title", [row])
    header, line = capsys.readouterr().out.splitlines()[1:]
    assert line.split() == ["2", "9", "band", "0.0123", "-", "-", "-", "1.50", "0.250", "-", "FAIL"] and "speed-up" in header


# ---------------------------------------------------------------------------------------------------------------------
# Cases and the timing rule
# ---------------------------------------------------------------------------------------------------------------------


def test_board_case_files():
    assert [len(read_cases(ROOT / "cases" / f"{name}.txt")) for name in ("qr.tests", "qr_v2.tests", "qr.benchmarks", "qr_v2.benchmarks", "stress.benchmarks")] \
        == [19, 22, 7, 12, 2]


@pytest.mark.parametrize("text, words", [
    ("batch: 2; n: 3; cond: 1", "key 'seed' is missing"),
    ("batch: 2; n: 3; cond: 1; seed: 1; colour: red", "unknown key 'colour'"),
    ("batch: 2; batch: 2; n: 3; cond: 1; seed: 1", "key 'batch' is given twice"),
    ("batch 2; n: 3; cond: 1; seed: 1", "expected 'key: value', got 'batch 2'"),
    ("batch: 2; n: 3; cond: -1; seed: 1", "key 'cond' must be at least 0, got -1"),
    ("batch: 2; n: 3; cond: 1; seed: 1; case: banded", "unknown value 'banded'"),
])
def test_unusable_cases_are_named(text, words):
    with pytest.raises(InputError, match="^there: ") as caught:
        parse_case(text, "there")
    assert words in str(caught.value)


def test_inputs_of_one_repeat():
    args = dict(batch=2, n=5, cond=1, seed=9)
    inputs = evaluation.make_inputs(args, "cpu")
    assert len(inputs) == 50 and torch.equal(inputs[3], evaluation.generate_input(2, 5, 1, 9 + 3 * 42, device="cpu"))
    assert len(evaluation.make_inputs(dict(batch=32, n=512, cond=1, seed=9), "cpu")) == 8


def test_statistics():
    t = timing_of([1.0, 2.0, 6.0])
    assert (t.runs, t.mean, t.best, t.worst) == (3, 3.0, 1.0, 6.0)
    assert t.std == pytest.approx(math.sqrt(7)) and t.err == pytest.approx(math.sqrt(7 / 3))
    assert timing_of([5.0]).err == 0


def test_the_rule_stops_where_it_says(monkeypatch):
    """A clock of our own: constant calls stop after 3 repeats and 0.1 s, noisy ones at the limits."""
    now = [0.0]
    step = [1e-3]
    monkeypatch.setattr(evaluation.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(evaluation.time, "perf_counter_ns", lambda: int(now[0] * 1e9))

    def kernel(x):
        calls.append(1)
        now[0] += step[0] * (1 + 0.5 * noisy * (len(calls) % 2))
        return x
    inputs = [torch.zeros(1)]
    for step[0], noisy, expected in ((0.05, 0, 3), (0.01, 0, 10), (0.001, 1, 200), (1.0, 1, 9), (50.0, 1, 3)):
        calls = []
        timing, outputs = evaluation.time_calls(kernel, inputs, evaluation.BENCHMARK)
        assert abs(timing.runs - expected) <= 1 and len(calls) == timing.runs and outputs == inputs, (step, noisy)
    calls = []
    assert evaluation.time_calls(kernel, inputs, evaluation.ONCE)[0].runs == 1
