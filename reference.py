"""Inputs, reference and judge of the board's `qr` task.

    generate_input        the board's matrices, draw for draw
    ref_kernel            torch.geqrf
    check_implementation  (ok, message) for an output, each matrix judged by itself
    measure               the figures behind that verdict

Conventions, LAPACK's: A = Q R; H holds R in its upper triangle and the tails of the reflectors V (unit lower trapezoidal)
below it; Q = H_0 H_1 ... H_(n-1) with H_k = I - tau_k v_k v_k^T. Figures are multiples of n * eps32 ("scaled").
"""
import math
from dataclasses import dataclass

import torch

from task import input_t, output_t

EPS32 = torch.finfo(torch.float32).eps
FACTOR_LIMIT = 20.0          # |R - Q^T A|_1 in n eps |A|_1, per matrix
ORTHOGONALITY_LIMIT = 100.0  # |Q^T Q - I|_1 in n eps, per matrix
CHUNK = 1 << 24              # matrix entries judged at a time: about eight float64 temporaries of 128 MiB

# ---------------------------------------------------------------------------------------------------------------------
# Inputs
# ---------------------------------------------------------------------------------------------------------------------

MIXED_WEIGHTS = {"dense": 6, "rankdef": 1, "nearrank": 1, "clustered": 1, "band": 1, "rowscale": 1, "nearcollinear": 1}
CASES = ("dense", "upper", "diagonal", "rankdef", "nearrank", "clustered", "band", "nearcollinear", "rowscale", "mixed")


def generate_input(batch: int, n: int, cond: int, seed: int, case: str = "dense", device=None) -> input_t:
    """A (batch, n, n), float32, contiguous: the matrices the board draws for this seed.

    cond >= 0 is a dynamic range in decades. `device` None means cuda where there is one, else cpu; the two generators
    draw different numbers. Raises ValueError for an unknown case, AssertionError for a size or cond out of range."""
    assert batch > 0, f"batch must be positive, got {batch}"
    assert n > 0, f"n must be positive, got {n}"
    assert cond >= 0, f"cond must not be negative, got {cond}"
    if case not in CASES:
        raise ValueError(f"unknown case {case!r}; expected one of {', '.join(CASES)}")
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    rand = torch.Generator(device).manual_seed(seed)
    a = _randn(rand, batch, n, n)  # drawn for every case, also where it is thrown away: the later draws depend on it
    if case != "mixed":
        return _shape(a, case, cond, rand).contiguous()
    labels = _mixed_labels(batch, rand)
    for label, profile in enumerate(MIXED_WEIGHTS):
        index = (labels == label).nonzero()[:, 0]
        if len(index):
            a[index] = _shape(a[index], profile, cond, rand)
    return a.contiguous()


def _randn(rand, *shape):
    return torch.randn(shape, generator=rand, device=rand.device, dtype=torch.float32)


def _logspace(last_exponent, n, device):
    """10^0 .. 10^last_exponent, (n,) float32."""
    return torch.logspace(0, last_exponent, n, dtype=torch.float32, device=device)


def _mixed_labels(batch, rand):
    """One profile number per matrix, (batch,) int64: dense and something else are both there when batch >= 2."""
    weights = torch.tensor(list(MIXED_WEIGHTS.values()), dtype=torch.float32, device=rand.device)
    labels = torch.multinomial(weights, batch, replacement=True, generator=rand)

    def draw(low, high):
        return torch.randint(low, high, (1,), generator=rand, device=rand.device)

    if batch >= 2:
        dense = labels == 0
        if not dense.any():
            labels[draw(0, batch)] = 0
        elif dense.all():
            position = draw(0, batch)
            labels[position] = draw(1, len(MIXED_WEIGHTS))
    return labels


def _shape(a, case, cond, rand):
    """Turn the normal draws a (m, n, n) into matrices of one kind; further draws come from rand."""
    m, n, _ = a.shape
    if case == "diagonal":
        sign = torch.where(_randn(rand, m, n) > 0, 1.0, -1.0)
        return torch.diag_embed(sign * _logspace(-max(cond, 2), n, a.device))
    if case == "rowscale":
        return a * _logspace(-max(cond, 4), n, a.device)[:, None]
    if case == "clustered":
        scale = torch.ones(n, dtype=torch.float32, device=a.device)
        scale[n // 2:] = 4 * EPS32
        if n >= 8:
            scale[n // 2 - 2:n // 2 + 2] = math.sqrt(EPS32)
        return a * scale

    rank = max(1, 3 * n // 4)
    if case == "upper":
        a = a.triu()
        a.diagonal(dim1=1, dim2=2).add_(torch.linspace(1, 0.25, n, device=a.device))
    elif case == "rankdef":
        a = a.clone()
        a[:, :, rank:] = 0
    elif case == "nearrank":
        noise = _randn(rand, m, n, n - rank)
        a = torch.cat((a[:, :, :rank], a[:, :, :n - rank] + 1e-5 * noise), dim=2)
    elif case == "band":
        i = torch.arange(n, device=a.device)
        inside = (i[:, None] - i).abs() <= max(2, min(32, n // 32))
        a = torch.where(inside, a, 0.0)
        a.diagonal(dim1=1, dim2=2).add_(torch.linspace(1, 0.5, n, device=a.device))
    elif case == "nearcollinear":
        base = _randn(rand, m, n, 1)
        a = base + 1e-4 * _randn(rand, m, n, n)
    return a * _logspace(-cond, n, a.device) if cond > 0 else a


# ---------------------------------------------------------------------------------------------------------------------
# Reference and judge
# ---------------------------------------------------------------------------------------------------------------------


def ref_kernel(data: input_t) -> output_t:
    """(H, tau) of data (batch, n, n)."""
    return torch.geqrf(data)


@dataclass(frozen=True)
class Figures:
    """The largest figures over a batch, scaled, and the matrix each of the two judged ones belongs to.

    NaN counts as the largest, and `ok` is written so that NaN fails. `problem` says what ruled the output out before any
    figure could be taken; they are NaN then."""
    factor: float = math.nan          # |R - Q^T A|_1 / (n eps |A|_1)
    orthogonality: float = math.nan   # |Q^T Q - I|_1 / (n eps)
    reconstruction: float = math.nan  # |Q R - A|_1 / (n eps |A|_1)
    leakage: float = math.nan         # |tril(Q^T A, -1)|_1 / (n eps |A|_1)
    columnwise: float = math.nan      # max_j |(R - Q^T A)_j|_2 / (n eps |A_j|_2), zero columns left out, Q in float64
    factor_matrix: int = 0
    orthogonality_matrix: int = 0
    problem: str = ""

    @property
    def ok(self) -> bool:
        return not self.problem and self.factor <= FACTOR_LIMIT and self.orthogonality <= ORTHOGONALITY_LIMIT

    @property
    def message(self) -> str:
        """One line: what is wrong, if anything, then every figure with the matrix that gave it."""
        if self.problem:
            return self.problem
        wrong = []
        if not self.factor <= FACTOR_LIMIT:
            wrong.append(f"factor residual of matrix {self.factor_matrix} is over {FACTOR_LIMIT:g}")
        if not self.orthogonality <= ORTHOGONALITY_LIMIT:
            wrong.append(f"orthogonality of matrix {self.orthogonality_matrix} is over {ORTHOGONALITY_LIMIT:g}")
        return "; ".join(wrong + [
            f"in n eps: factor {self.factor:.3g} (worst: matrix {self.factor_matrix}), "
            f"orthogonality {self.orthogonality:.3g} (worst: matrix {self.orthogonality_matrix}), "
            f"columnwise {self.columnwise:.3g}, reconstruction {self.reconstruction:.3g}, leakage {self.leakage:.3g}"])


def check_implementation(data: input_t, output: output_t) -> tuple[bool, str]:
    """Is `output` = (H, tau) a QR factorization of data (batch, n, n) float32? Returns (ok, one-line message)."""
    figures = measure(data, output)
    return figures.ok, figures.message


@torch.no_grad()
def measure(data: input_t, output: output_t) -> Figures:
    """Figures of `output` = (H, tau) for data (batch, n, n) float32, in float64, CHUNK entries at a time."""
    problem = _complaint(data, output)
    if problem:
        return Figures(problem=problem)
    if data.numel() == 0:
        return Figures(0.0, 0.0, 0.0, 0.0, 0.0)
    h, tau = output
    batch, n, _ = data.shape
    step = max(1, CHUNK // (n * n))
    scaled = torch.cat([_scaled_residuals(data[i:i + step], h[i:i + step], tau[i:i + step])
                        for i in range(0, batch, step)], dim=1)
    worst, where = (x.tolist() for x in scaled.max(dim=1))  # max lets NaN through
    return Figures(*worst, factor_matrix=where[0], orthogonality_matrix=where[1])


def _complaint(data, output):
    """What rules the output out before any arithmetic, or an empty string."""
    if not isinstance(output, tuple) or len(output) != 2:
        what = f"{len(output)} values" if isinstance(output, (tuple, list)) else "one value"
        return f"expected the tuple (H, tau), got {type(output).__name__} of {what}"
    batch, n, _ = data.shape
    for name, tensor, shape in (("H", output[0], (batch, n, n)), ("tau", output[1], (batch, n))):
        if not isinstance(tensor, torch.Tensor):
            return f"{name}: expected a tensor, got {type(tensor).__name__}"
        if tuple(tensor.shape) != shape:
            return f"{name}: expected shape {shape}, got {tuple(tensor.shape)}"
        if tensor.dtype != torch.float32:
            return f"{name}: expected torch.float32, got {tensor.dtype}"
        if tensor.device != data.device:
            return f"{name}: expected device {data.device}, got {tensor.device}"
        if tensor.numel() and tensor.untyped_storage().data_ptr() == data.untyped_storage().data_ptr():
            return f"{name}: shares memory with the input"
        bad = (~tensor.isfinite()).flatten(1).any(1) if tensor.numel() else tensor.new_zeros(0, dtype=torch.bool)
        if bad.any():
            return f"{name}: not finite in {int(bad.sum())} of {batch} matrices, first in matrix {int(bad.nonzero()[0])}"
    return ""


def _scaled_residuals(a, h, tau):
    """The five figures of Figures, in its order, for each matrix of a, h (m, n, n), tau (m, n): (5, m) float64."""
    q = torch.linalg.householder_product(h, tau).double()  # formed in float32, as the board does
    a, r, n = a.double(), h.double().triu(), a.shape[-1]
    eye = torch.eye(n, dtype=a.dtype, device=a.device)
    qta = q.mT @ a
    norm = _norm1(a)
    exact = r - _apply_q_transposed(h.double(), tau.double(), a)
    return torch.stack((
        _ratio(_norm1(r - qta), norm),
        _norm1(q.mT @ q - eye),
        _ratio(_norm1(q @ r - a), norm),
        _ratio(_norm1(qta.tril(-1)), norm),
        _ratio(exact.norm(dim=1), a.norm(dim=1), ignore_zero_size=True).amax(1),
    )) / (n * EPS32)


def _norm1(x):
    """Matrix 1-norm, the largest column sum: (m, n, n) -> (m,)."""
    return torch.linalg.matrix_norm(x, ord=1)


def _ratio(residual, size, ignore_zero_size=False):
    """residual / size, where nothing over nothing is 0 and something over nothing is inf, or 0 if such sizes are ignored."""
    nothing = size == 0 if ignore_zero_size else residual == 0
    return torch.where(nothing, 0.0, residual / size)


def _apply_q_transposed(h, tau, a, nb=64):
    """Q^T a for a (m, n, n) in the dtype of h, in blocks of nb reflectors: Q^T = ... (I - V1 T1^T V1^T)(I - V0 T0^T V0^T).

    Batched products only: householder_product forms one matrix per library call. T = (I + D U)^-1 D with D = diag(tau)
    and U the strictly upper part of V^T V, which holds for tau = 0 too."""
    a, n = a.clone(), a.shape[-1]
    for k in range(0, n, nb):
        v = h[:, k:, k:k + nb].tril(-1)
        v.diagonal(dim1=1, dim2=2).fill_(1)
        d = tau[:, k:k + nb]
        eye = torch.eye(d.shape[1], dtype=h.dtype, device=h.device)
        t = torch.linalg.solve_triangular(eye + d[:, :, None] * (v.mT @ v).triu(1), torch.diag_embed(d),
                                          upper=True, unitriangular=True)
        a[:, k:] -= v @ (t.mT @ (v.mT @ a[:, k:]))
    return a
