"""The benchmarks of single kernels: what they would launch, and that they run where they can."""
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import submission
from submission import WHOLE, Choice, DeviceInfo

BENCHMARKS = Path(__file__).resolve().parent.parent / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))
import kernels  # noqa: E402

CHOICE = Choice("wgmma", None, DeviceInfo((9, 0), 132, 232448, (66, 30, 15, 7)), "")


@pytest.mark.parametrize("rows", kernels.ROWS)
@pytest.mark.parametrize("batch", [1, 132, 640])
def test_steps(rows, batch):
    """Two panels without an update, or a panel and a last block that holds what is left; with one, after the panel that completes V's width."""
    first, second = kernels.first_panels(batch, rows, CHOICE)
    assert first.gram and first.column == 0 and second.column == 64 and not first.panels and not second.panels
    assert second.gram or rows <= 256 and second.kind == WHOLE and 4 * second.rows_per_lane >= rows - 64

    def shape(panels):
        return submission.larfb_shape(batch, rows, panels, rows // 64 - panels, 132, CHOICE.info, "wgmma")[1]
    one, two = kernels.updating(batch, rows, 64, CHOICE), kernels.updating(batch, rows, 128, CHOICE)
    assert one[0].panels == 1 and one[0][7:11] == shape(1) and one[1] == second
    assert two is None if second.kind == WHOLE else two[0] == first and two[1].panels == 2 and two[1][7:11] == shape(2)


@pytest.mark.parametrize("script", ["kernels.py", "stages.py"])
def test_without_a_gpu_it_says_so(script):
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    done = subprocess.run([sys.executable, BENCHMARKS / script], capture_output=True, text=True)
    assert done.returncode == 1 and done.stderr == f"{script}: torch sees no CUDA device\n"


def test_too_few_rows_are_refused():
    done = subprocess.run([sys.executable, BENCHMARKS / "kernels.py", "--rows", "100"], capture_output=True, text=True)
    assert done.returncode == 2 and "--rows: expected at least 128, got 100" in done.stderr


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu():
    done = subprocess.run([sys.executable, BENCHMARKS / "kernels.py", "--rows", "128", "--rows", "512", "--calls", "1"], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and "panels" in done.stdout and "TFLOP/s" in done.stdout, done.stdout + done.stderr
