"""Input kinds against their definitions and fixed checksums; the judge against one way of being wrong at a time."""
import dataclasses
import math

import pytest
import torch

import reference
from reference import CASES, EPS32, check_implementation, generate_input, measure, ref_kernel
from task import TestSpec

B, N, SEED = 3, 40, 5


def make(case, batch=B, n=N, cond=2, seed=SEED):
    return generate_input(batch, n, cond, seed, case, device="cpu")


def draws(*shapes, seed=SEED):
    """The generator's first normal draws, one tensor per shape."""
    rand = torch.Generator("cpu").manual_seed(seed)
    return [torch.randn(shape, generator=rand) for shape in shapes]


# ---------------------------------------------------------------------------------------------------------------------
# Inputs
# ---------------------------------------------------------------------------------------------------------------------

FULL = (B, N, N)
COLUMNS = torch.logspace(0, -2, N)  # the column scaling of cond = 2


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("n", [1, 2, 7, 40])
def test_every_kind_at_every_size(case, n):
    a = make(case, n=n)
    assert a.shape == (B, n, n) and a.dtype == torch.float32 and a.is_contiguous() and a.isfinite().all()
    assert torch.equal(a, make(case, n=n)), "the same seed gives the same matrices"
    if case != "diagonal" or n > 2:  # 2 x 3 signs may well agree
        assert not torch.equal(a, make(case, n=n, seed=SEED + 1))


def test_dense_is_the_first_draw_with_scaled_columns():
    (a,) = draws(FULL)
    assert torch.equal(make("dense", cond=0), a)
    assert torch.equal(make("dense", cond=2), a * COLUMNS)
    assert torch.equal(generate_input(B, N, 2, SEED), generate_input(B, N, 2, SEED, "dense")), "dense is the default"


def test_upper():
    (a,) = draws(FULL)
    assert torch.equal(make("upper"), (a.triu() + torch.diag(torch.linspace(1, 0.25, N))) * COLUMNS)


@pytest.mark.parametrize("cond, exponent", [(0, 2), (2, 2), (5, 5)])
def test_diagonal(cond, exponent):
    _, d = draws(FULL, (B, N))
    a = make("diagonal", cond=cond)
    entries = a.diagonal(dim1=1, dim2=2)
    assert torch.equal(a, torch.diag_embed(entries))
    assert torch.equal(entries.sign(), torch.where(d > 0, 1.0, -1.0))
    torch.testing.assert_close(entries.abs(), torch.logspace(0, -exponent, N).expand(B, N))


def test_rankdef():
    (a,) = draws(FULL)
    got = make("rankdef")
    assert torch.equal(got[:, :, :30], (a * COLUMNS)[:, :, :30]) and not got[:, :, 30:].any()
    assert make("rankdef", n=1).all(), "one column stays"


def test_nearrank():
    a, noise = draws(FULL, (B, N, 10))
    want = a.clone()
    want[:, :, 30:] = a[:, :, :10] + 1e-5 * noise
    assert torch.equal(make("nearrank"), want * COLUMNS)


@pytest.mark.parametrize("n", [4, 7, 8, 40])
def test_clustered(n):
    (a,) = draws((B, n, n))
    scale = [1.0] * (n // 2) + [4 * EPS32] * (n - n // 2)
    if n >= 8:
        scale[n // 2 - 2:n // 2 + 2] = [math.sqrt(EPS32)] * 4
    assert torch.equal(make("clustered", n=n, cond=2), a * torch.tensor(scale)), "no column scaling"


@pytest.mark.parametrize("n, width", [(40, 2), (128, 4), (1100, 32)])
def test_band(n, width):
    (a,) = draws((1, n, n))
    i = torch.arange(n)
    want = a * ((i[:, None] - i).abs() <= width) + torch.diag(torch.linspace(1, 0.5, n))
    assert torch.equal(make("band", batch=1, n=n, cond=0), want)


def test_nearcollinear():
    _, base, noise = draws(FULL, (B, N, 1), FULL)
    assert torch.equal(make("nearcollinear"), (base + 1e-4 * noise) * COLUMNS)


@pytest.mark.parametrize("cond, exponent", [(0, 4), (6, 6)])
def test_rowscale(cond, exponent):
    (a,) = draws(FULL)
    assert torch.equal(make("rowscale", cond=cond), a * torch.logspace(0, -exponent, N)[:, None])


def test_mixed_transforms_each_label_together_in_order():
    batch, seed = 24, 6
    rand = torch.Generator("cpu").manual_seed(seed)
    a = torch.randn((batch, N, N), generator=rand)
    labels = torch.multinomial(torch.tensor([6.0, 1, 1, 1, 1, 1, 1]), batch, replacement=True, generator=rand)
    assert len(labels.unique()) == 7, "this seed draws every profile"
    near = labels == 2
    noise = torch.randn((int(near.sum()), N, 10), generator=rand)
    got = make("mixed", batch=batch, seed=seed)
    want = a[near]
    want[:, :, 30:] = want[:, :, :10] + 1e-5 * noise
    assert torch.equal(got[near], want * COLUMNS)
    assert torch.equal(got[labels == 0], a[labels == 0] * COLUMNS)
    assert not got[labels == 1][:, :, 30:].any()
    collinear = labels == 6  # the last profile, so its draws follow all others
    count = int(collinear.sum())
    base = torch.randn((count, N, 1), generator=rand)
    assert torch.equal(got[collinear], (base + 1e-4 * torch.randn((count, N, N), generator=rand)) * COLUMNS)


def test_mixed_labels_hold_dense_and_another():
    """Over many seeds, for small batches, where either can be missing from the first draw."""
    repaired = {"no dense": 0, "all dense": 0}
    for seed in range(200):
        rand = torch.Generator("cpu").manual_seed(seed)
        first = torch.multinomial(torch.tensor([6.0, 1, 1, 1, 1, 1, 1]), 2, replacement=True, generator=rand)
        labels = reference._mixed_labels(2, torch.Generator("cpu").manual_seed(seed))
        assert (labels == 0).sum() == 1, seed
        want = first.clone()
        if not (first == 0).any():
            want[torch.randint(0, 2, (1,), generator=rand)] = 0
            repaired["no dense"] += 1
        elif (first == 0).all():
            position = torch.randint(0, 2, (1,), generator=rand)
            want[position] = torch.randint(1, 7, (1,), generator=rand)
            repaired["all dense"] += 1
        assert torch.equal(labels, want), seed
    assert all(repaired.values())
    single = [int(reference._mixed_labels(1, torch.Generator("cpu").manual_seed(s))) for s in range(40)]
    assert 0 in single and any(single), "one matrix keeps what it drew"


# sum of a[b, i, j] * weight, weight = cos(0, 1, 2, ...): depends on every entry's value and place
CHECKSUMS = {
    "dense": -1.60496198,
    "upper": -29.4892908,
    "diagonal": -5.88559844,
    "rankdef": -0.365479881,
    "nearrank": -7.69753998,
    "clustered": -5.95080777,
    "band": -3.31467799,
    "nearcollinear": -7.59455478,
    "rowscale": -31.0558615,
    "mixed": -26.0089747,
}


@pytest.mark.parametrize("case", CASES)
def test_checksum(case):
    """The CPU generator's matrices themselves: a changed draw order or scale shows here even if every property holds."""
    a = generate_input(4, 64, 1, 2024, case, device="cpu").double()
    weight = torch.cos(torch.arange(a.numel(), dtype=torch.float64)).reshape(a.shape)
    assert float((a * weight).sum()) == pytest.approx(CHECKSUMS[case], rel=1e-5)


@pytest.mark.parametrize("bad", [dict(batch=0), dict(n=0), dict(n=-3), dict(cond=-1)])
def test_sizes_out_of_range_are_asserted(bad):
    with pytest.raises(AssertionError, match=next(iter(bad))):
        generate_input(**{**dict(batch=2, n=4, cond=0, seed=1), **bad})


def test_unknown_case_is_a_value_error():
    with pytest.raises(ValueError, match="unknown case 'banded'"):
        generate_input(2, 4, 0, 1, "banded")


def test_spec_names_the_arguments():
    assert TestSpec.__required_keys__ == {"batch", "n", "cond", "seed"} and TestSpec.__optional_keys__ == {"case"}


# ---------------------------------------------------------------------------------------------------------------------
# Judge
# ---------------------------------------------------------------------------------------------------------------------


def factored(case="dense", batch=B, n=N, **kw):
    a = make(case, batch=batch, n=n, **kw)
    h, tau = torch.geqrf(a)
    return a, h.contiguous(), tau


def refused(a, output, *words):
    ok, message = check_implementation(a, output)
    assert ok is False and "\n" not in message
    for word in words:
        assert word in message, message


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("n", [1, 2, 33, 130])
def test_accepts_geqrf(case, n):
    a = make(case, n=n)
    ok, message = check_implementation(a, ref_kernel(a))
    assert ok is True, message
    for word in ("factor", "orthogonality", "columnwise", "reconstruction", "leakage"):
        assert word in message


@pytest.mark.parametrize("case", CASES)
def test_columnwise_is_its_definition(case):
    """Against Q from the library in float64, over more than one block of reflectors and with some tau zero."""
    a, h, tau = factored(case, n=150)
    q = torch.linalg.householder_product(h.double(), tau.double())
    residual, size = (h.double().triu() - q.mT @ a.double()).norm(dim=1), a.double().norm(dim=1)
    want = float((residual / size)[size > 0].max()) / (150 * EPS32)
    assert measure(a, (h, tau)).columnwise == pytest.approx(want, rel=1e-6, abs=1e-9)


def test_figures_are_their_definitions():
    a, h, tau = factored(n=20)
    h[1, 3, 7] *= 1 + 1e-3  # makes matrix 1 the worst, by far more than rounding
    got = measure(a, (h, tau))
    q, r = torch.linalg.householder_product(h, tau).double()[1], h[1].double().triu()
    unit, norm1 = 20 * EPS32, (lambda x: float(x.abs().sum(0).max()))
    size = norm1(a[1].double())
    assert got.factor == pytest.approx(norm1(r - q.T @ a[1].double()) / size / unit, rel=1e-9)
    assert got.reconstruction == pytest.approx(norm1(q @ r - a[1].double()) / size / unit, rel=1e-9)
    assert got.factor_matrix == 1
    leak = [norm1((torch.linalg.householder_product(h, tau).double()[i].T @ a[i].double()).tril(-1)) / norm1(a[i].double()) for i in range(B)]
    assert got.leakage == pytest.approx(max(leak) / unit, rel=1e-9)
    qq = torch.linalg.householder_product(h, tau).double()
    orth = [norm1(x.T @ x - torch.eye(20)) / unit for x in qq]
    assert got.orthogonality == pytest.approx(max(orth), rel=1e-9) and got.orthogonality_matrix == orth.index(max(orth))


def test_chunks_do_not_change_the_figures(monkeypatch):
    a, h, tau = factored("mixed", batch=7)
    h[5, 0, 1] += 1
    whole = measure(a, (h, tau))
    monkeypatch.setattr(reference, "CHUNK", 3 * N * N)  # 3 + 3 + 1 matrices
    chunked = measure(a, (h, tau))
    assert chunked.factor_matrix == whole.factor_matrix == 5
    for field in ("factor", "orthogonality", "columnwise", "reconstruction", "leakage"):
        assert getattr(chunked, field) == pytest.approx(getattr(whole, field), rel=1e-9)


def test_rejects_perturbed_r():
    a, h, tau = factored()
    h[1, 2, 30] += 1e-2 * h[1].abs().max()
    refused(a, (h, tau), "factor residual of matrix 1 is over 20")


def test_rejects_perturbed_tau():
    a, h, tau = factored()
    tau[2, 4] *= 1.01
    refused(a, (h, tau), "matrix 2", "orthogonality of matrix 2 is over 100")


def test_rejects_perturbed_reflector():
    a, h, tau = factored()
    h[0, 20, 3] += 0.1
    refused(a, (h, tau), "matrix 0")


def test_rejects_swapped_matrices():
    a, h, tau = factored()
    order = [1, 0, 2]
    refused(a, (h[order], tau[order]), "factor residual of matrix")


def test_rejects_one_bad_matrix_in_64():
    """A perturbation that the batch's largest norm would hide: matrices are judged one by one."""
    a, _, _ = factored(batch=64, n=16)
    a[41] *= 1e-6
    h, tau = torch.geqrf(a)
    h = h.contiguous()
    h[41] += 1e-8 * torch.ones(16, 16).triu()
    batch_wide = 1e-8 * 16 / (16 * EPS32 * float(a.abs().sum(1).max()))
    assert batch_wide < 20, "judged against the batch's norm it would pass"
    refused(a, (h, tau), "matrix 41")


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("which, name", [(0, "H"), (1, "tau")])
def test_rejects_one_value_not_finite(which, name, value):
    a, *output = factored()
    output[which].view(B, -1)[2, 5] = value
    refused(a, tuple(output), f"{name}: not finite in 1 of 3 matrices, first in matrix 2")


def test_rejects_everything_infinite():
    a, h, tau = factored()
    refused(a, (torch.full_like(h, math.inf), torch.full_like(tau, math.inf)), "not finite")


def test_rejects_values_that_overflow_in_forming_q():
    a, h, tau = factored()
    refused(a, (h * (1e38 / h.abs().amax()), tau), "over 20")


def test_rejects_input_not_finite():
    a, h, tau = factored()
    a[0, 0, 0] = math.nan
    refused(a, (h, tau), "matrix 0")


def test_rejects_wrong_shapes():
    a, h, tau = factored()
    refused(a, (h[:, :, :-1], tau), "H: expected shape (3, 40, 40), got (3, 40, 39)")
    refused(a, (h[0], tau), "H: expected shape")
    refused(a, (h, tau[:, :-1]), "tau: expected shape (3, 40), got (3, 39)")
    refused(a, (h, tau[:, :, None]), "tau: expected shape")


def test_rejects_wrong_dtypes_and_devices():
    a, h, tau = factored()
    refused(a, (h.double(), tau), "H: expected torch.float32, got torch.float64")
    refused(a, (h, tau.bfloat16()), "tau: expected torch.float32, got torch.bfloat16")
    refused(a, (h.to("meta"), tau), "H: expected device cpu, got meta")


def test_rejects_what_is_no_pair_of_tensors():
    a, h, tau = factored()
    refused(a, [h, tau], "expected the tuple (H, tau), got list of 2 values")
    refused(a, (h,), "got tuple of 1 values")
    refused(a, h, "got Tensor of one value")
    refused(a, None, "got NoneType")
    refused(a, (h, None), "tau: expected a tensor, got NoneType")


def test_rejects_h_aliasing_the_input():
    a, _, tau = factored()
    refused(a, (a, tau), "H: shares memory with the input")
    a, _, tau = factored("upper")  # here the input is its own factor, but it must not be handed back
    refused(a, (a.mT.mT[:], tau), "H: shares memory with the input")
    refused(a.clone(), (make("dense"), tau), "factor residual")


def test_zero_matrices_and_empty_batches():
    zero = torch.zeros(2, 5, 5)
    assert check_implementation(zero, torch.geqrf(zero))[0]
    h, tau = torch.geqrf(zero)
    refused(zero, (h + 1e-30, tau), "factor inf")
    for shape in ((0, 4, 4), (3, 0, 0)):
        a = torch.zeros(shape)
        assert check_implementation(a, (torch.empty_like(a), torch.empty(shape[:2])))[0]
        refused(a, (torch.empty_like(a), torch.empty(1, 9)), "tau: expected shape")


def test_nan_figures_fail():
    good = reference.Figures(1.0, 1.0, 1.0, 1.0, 1.0)
    assert good.ok
    assert not dataclasses.replace(good, factor=math.nan).ok
    assert not dataclasses.replace(good, orthogonality=math.nan).ok
    assert not reference.Figures().ok
    assert not dataclasses.replace(good, factor=20.001).ok and not dataclasses.replace(good, orthogonality=100.1).ok
    assert dataclasses.replace(good, factor=20.0, orthogonality=100.0).ok, "the limits themselves pass"
