"""Types of the board's `qr` task: what a submission receives, what it returns, and what describes a case."""
from typing import NotRequired, TypedDict, TypeVar

import torch

input_t = TypeVar("input_t", bound=torch.Tensor)                        # A (batch, n, n) float32
output_t = TypeVar("output_t", bound=tuple[torch.Tensor, torch.Tensor])  # H (batch, n, n), tau (batch, n), both float32


class TestSpec(TypedDict):
    """One case: the keyword arguments of `reference.generate_input`."""
    __test__ = False  # not a test class, whatever its name makes pytest think
    batch: int
    n: int
    cond: int  # dynamic-range knob in decades, not a condition number
    seed: int
    case: NotRequired[str]  # kind of matrix, "dense" where absent
