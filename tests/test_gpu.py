"""custom_kernel on a GPU: every size class, every kind of input, every backend of the card, and the ways it is used.

A quick set for compute-sanitizer: pytest tests/test_gpu.py -k small_set"""
import functools
import gc
import threading
import warnings

import pytest
import torch

import submission
from reference import CASES, generate_input, measure
from submission import CLUSTER, SINGLE, TALL, WHOLE, custom_kernel

pytestmark = pytest.mark.gpu
build_once = functools.lru_cache(maxsize=None)(submission.build)

SIZES = [*range(1, 21), 31, 32, 33, 63, 64, 65, 127, 128, 129, 176, 255, 256, 257, 352, 511, 512, 513, 1000, 1024, 1500]


@pytest.fixture(params=submission.BACKENDS)
def backend(request, monkeypatch, fresh_choice):
    possible = submission.candidates(torch.cuda.get_device_capability())
    if request.param not in possible:
        pytest.skip(f"this card has {', '.join(possible)}")
    monkeypatch.setenv("QR_BACKEND", request.param)
    monkeypatch.setattr(submission, "build", build_once)
    return request.param


def normal(*shape, seed=1):
    return torch.randn(shape, generator=torch.Generator("cuda").manual_seed(seed), device="cuda")


def poisoned(work):
    """work() with every tensor it allocates full of NaN beforehand."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    try:
        return work()
    finally:
        torch.use_deterministic_algorithms(False)


def check(A, output):
    """A tenth of the board's limits for every matrix, and each column's residual small against that column."""
    figures = measure(A, output)
    assert figures.ok, figures.message
    assert figures.factor < 2 and figures.orthogonality < 10, figures.message
    assert figures.columnwise < (3 if A.shape[1] < 256 else 2), figures.message


def factor(A):
    kept = A.clone()
    H, tau = poisoned(lambda: custom_kernel(A))
    assert torch.equal(A, kept), "the input is only read"
    assert H.shape == A.shape and tau.shape == A.shape[:2] and H.dtype == tau.dtype == torch.float32 and H.device == tau.device == A.device
    assert H.is_contiguous() and tau.is_contiguous()
    return H, tau


# ---------------------------------------------------------------------------------------------------------------------
# Sizes and kinds, on each backend
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", SIZES)
def test_sizes(backend, n):
    for batch in range(1, 8) if n < 600 else (1, 2, 7):
        A = generate_input(batch, n, 1, 10 * n + batch)
        assert submission.plan_for(A).backend == backend
        check(A, factor(A))


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("n", [20, 64, 96, 129, 176, 256, 257, 352, 512, 1024])
def test_kinds(backend, n, case):
    for cond in (0, 2):
        A = generate_input(5 if n < 600 else 2, n, cond, n + cond, case)
        check(A, factor(A))


@pytest.mark.parametrize("batch, n", [(1, 5), (2, 33), (3, 64), (5, 130), (2, 193), (3, 257), (2, 320), (1, 513), (2, 640)])
def test_small_set(backend, batch, n):
    for case in ("dense", "mixed", "upper"):
        A = generate_input(batch, n, 1, n, case)
        check(A, factor(A))


def test_more_matrices_than_multiprocessors(backend):
    for batch, n in ((700, 33), (300, 200), (150, 520)):
        A = generate_input(batch, n, 1, batch)
        check(A, factor(A))


# ---------------------------------------------------------------------------------------------------------------------
# Each panel kernel alone
# ---------------------------------------------------------------------------------------------------------------------


def with_kind(n, kind, ranks, rows_per_lane):
    """The route of n with its panels made column by column by one kernel (no Gram panel before it)."""
    index = torch.cuda.current_device()
    choice = submission.choose_backend(index)
    steps = [s if s.kind == WHOLE else s._replace(kind=kind, ranks=ranks, rows_per_lane=rows_per_lane, gram=0)
             for s in submission.plan(3, n, choice.info, choice.name).steps]
    return lambda A: choice.extension.geqrf(A, submission._flat(submission.Plan(choice.name, tuple(steps))))


@pytest.mark.parametrize("n, kind, ranks, rows_per_lane", [
    (256, SINGLE, 1, 8), (250, SINGLE, 1, 16), (512, SINGLE, 1, 16), (449, SINGLE, 1, 16), (256, CLUSTER, 4, 2), (512, CLUSTER, 8, 4), (700, CLUSTER, 4, 8),
    (1023, CLUSTER, 2, 16), (256, TALL, 1, 0), (323, TALL, 1, 0), (700, TALL, 2, 0), (520, TALL, 8, 0)])
def test_column_by_column_kernels(n, kind, ranks, rows_per_lane):
    if ranks > 1 and torch.cuda.get_device_capability()[0] < 9:
        pytest.skip("clusters need compute capability 9.0")
    run = with_kind(n, kind, ranks, rows_per_lane)
    for case in ("dense", "rankdef", "upper", "diagonal", "clustered", "rowscale", "nearcollinear"):
        A = generate_input(3, n, 1, n, case)
        check(A, poisoned(lambda: run(A)))


# ---------------------------------------------------------------------------------------------------------------------
# LAPACK's conventions
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 7, 64, 176, 352, 512])
def test_signs_and_last_tau(n):
    A = normal(4, n, n)
    (H, tau), (want, _) = custom_kernel(A), torch.geqrf(A)
    r, w = (x.diagonal(dim1=1, dim2=2) for x in (H, want))
    clear = w.abs() > 100 * n * torch.finfo(torch.float32).eps * torch.linalg.matrix_norm(A, ord=1)[:, None]
    assert torch.equal(r.sign()[clear], w.sign()[clear]) and clear.float().mean() > 0.5
    assert not tau[:, -1].any() and (tau[:, :-1] > 0).all()


@pytest.mark.parametrize("n", [5, 64, 176, 300, 600])
def test_nothing_below_the_diagonal_is_left_alone(n):
    """tau = 0 and R = A, bit for bit; a zero column in the middle too."""
    A = generate_input(3, n, 1, n, "upper")
    H, tau = factor(A)
    assert torch.equal(H, A) and not tau.any()
    Z = torch.zeros(2, n, n, device="cuda")
    H, tau = factor(Z)
    assert not H.any() and not tau.any()
    B = normal(2, n, n)
    B[:, :, n // 2] = 0
    H, tau = factor(B)
    assert not tau[:, n // 2].any() and not H[:, :, n // 2].any()
    check(B, (H, tau))


@pytest.mark.parametrize("n", [20, 176, 300, 600])
def test_extreme_scales(n):
    A = normal(3, n, n)
    for scale in (1e-30, 1e-20, 1e18, 1e30):
        check(A * scale, factor(A * scale))
    decades = torch.logspace(-35, 36, n, device="cuda")
    check(A * decades, factor(A * decades))
    check(A * decades.flip(0), factor(A * decades.flip(0)))


@pytest.mark.parametrize("n", [20, 176, 300, 512, 1024])
def test_not_finite_stays_in_its_matrix(n):
    A = normal(5, n, n)
    clean = custom_kernel(A)
    A[1] = float("nan")
    A[2, n // 2, n // 3] = float("inf")
    A[3, 0, 0] = float("nan")
    H, tau = custom_kernel(A)
    for i in (0, 4):
        assert torch.equal(H[i], clean[0][i]) and torch.equal(tau[i], clean[1][i])
    for i in (1, 2, 3):
        assert not H[i].isfinite().all(), "what is wrong is not hidden"


# ---------------------------------------------------------------------------------------------------------------------
# Ways of calling
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [9, 176, 352, 512, 1024, 2048])
def test_same_bits_every_time_and_wherever_in_the_batch(n):
    A = normal(5, n, n)
    H, tau = custom_kernel(A)
    for _ in range(3):
        again = custom_kernel(A)
        assert torch.equal(H, again[0]) and torch.equal(tau, again[1])
    shifted = custom_kernel(A.roll(2, 0))
    assert torch.equal(H.roll(2, 0), shifted[0]) and torch.equal(tau.roll(2, 0), shifted[1])


@pytest.mark.parametrize("n", [33, 193, 256])
def test_strides_do_not_matter(n):
    A = normal(6, n, n)
    for view in (A.mT, A[::2], A.flip(1), normal(1, n, n).expand(3, n, n), normal(3, n + 3, n + 1)[:, 2:n + 2, 1:]):
        want = custom_kernel(view.contiguous())
        got = custom_kernel(view)
        assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])
    offset = normal(1 + 2 * n * n)[1:].view(2, n, n)  # contiguous, but not on 16 bytes
    check(offset, factor(offset))


def test_empty():
    for shape in ((0, 512, 512), (3, 0, 0), (0, 0, 0)):
        H, tau = custom_kernel(torch.empty(shape, device="cuda"))
        assert H.shape == shape and tau.shape == shape[:2] and H.is_cuda and tau.is_cuda
    torch.cuda.synchronize()


def test_modes_of_torch_change_nothing():
    A = normal(3, 352, 352)
    H, tau = custom_kernel(A)
    before = torch.get_float32_matmul_precision()
    for precision in ("highest", "high", "medium"):
        torch.set_float32_matmul_precision(precision)
        assert torch.equal(custom_kernel(A)[0], H) and torch.get_float32_matmul_precision() == precision
    torch.set_float32_matmul_precision(before)
    with torch.autocast("cuda", torch.bfloat16):
        got = custom_kernel(A)
    assert got[0].dtype == torch.float32 and torch.equal(got[0], H)
    with torch.inference_mode():
        assert torch.equal(custom_kernel(A)[0], H)
    with pytest.raises(RuntimeError):
        custom_kernel(A.clone().requires_grad_())[0].sum().backward()


def test_wrong_types_on_the_device():
    for dtype in (torch.float64, torch.float16, torch.complex64):
        with pytest.raises(TypeError, match="A: expected dtype torch.float32"):
            custom_kernel(torch.zeros(2, 3, 3, dtype=dtype, device="cuda"))


def test_sizes_up_and_down_in_one_process():
    """A small launch must not lower what a large one needs."""
    for n in (1024, 176, 1024, 48, 512, 33, 193, 1500):
        A = normal(2, n, n)
        check(A, factor(A))


def test_memory_is_flat_also_when_calls_fail():
    A = normal(8, 512, 512)
    used = []
    for i in range(60):
        custom_kernel(A)
        with pytest.raises(TypeError):
            custom_kernel(A.double())
        gc.collect()
        used.append(torch.cuda.memory_allocated())
    assert len(set(used[5:])) == 1


def test_threads():
    inputs = [normal(4, n, n, seed=n) for n in (100, 352, 512, 300)]
    want = [custom_kernel(A) for A in inputs]
    wrong = []

    def work(i):
        for _ in range(20):
            H, tau = custom_kernel(inputs[i % 4])
            if not (torch.equal(H, want[i % 4][0]) and torch.equal(tau, want[i % 4][1])):
                wrong.append(i)
    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_no_call_waits_for_the_device():
    """Between its first and last launch a call does not synchronize: it returns while the device is still busy."""
    A = normal(64, 512, 512)
    custom_kernel(A)
    torch.cuda.synchronize()
    done = torch.cuda.Event()
    for _ in range(5):
        custom_kernel(A)
    done.record()
    assert not done.query()
    torch.cuda.synchronize()


def test_out_of_memory_is_torch_s_error_and_passes():
    A = normal(2, 256, 256)
    with pytest.raises(torch.OutOfMemoryError):
        custom_kernel(torch.empty(1, 1, 1, device="cuda").expand(200_000, 1024, 1024))
    check(A, factor(A))


def test_other_device_than_the_current_one():
    if torch.cuda.device_count() < 2:
        pytest.skip("one CUDA device")
    for n in (176, 512, 1024):
        A = normal(2, n, n)
        H, tau = custom_kernel(A.to("cuda:1"))
        assert H.device == tau.device == torch.device("cuda:1") and torch.cuda.current_device() == 0
        check(A, (H.to(A.device), tau.to(A.device)))


def test_forced_fallback_is_geqrf(monkeypatch, fresh_choice):
    monkeypatch.setenv("QR_FORCE_FALLBACK", "1")
    A = normal(2, 200, 200)
    assert submission.plan_for(A).backend == "geqrf"
    assert all(map(torch.equal, custom_kernel(A), torch.geqrf(A)))


def test_a_wrong_backend_is_found_out(monkeypatch, fresh_choice):
    """An extension whose tau is off by a thousandth does not survive its proof, and the next one serves."""
    real = submission.build
    best = submission.candidates(torch.cuda.get_device_capability())[0]

    class Off:
        def __init__(self, extension):
            self.resident_clusters, self.extension = extension.resident_clusters, extension

        def geqrf(self, *arguments):
            H, tau = self.extension.geqrf(*arguments)
            return H, tau * 1.001
    monkeypatch.setattr(submission, "build", lambda name, capability: Off(real(name, capability)) if name == best else real(name, capability))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        A = normal(2, 300, 300)
        check(A, custom_kernel(A))
        custom_kernel(A)
    said = [str(w.message) for w in caught if "custom_kernel" in str(w.message)]
    assert len(said) == 1 and f"cannot use {best}" in said[0] and "wrong factorization" in said[0]
    assert submission.choose_backend(0).name != best
