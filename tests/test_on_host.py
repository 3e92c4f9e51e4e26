"""The kernels themselves, run on the host's threads (tests/host): indices, barriers and order of steps, without a GPU.

Of submission.py's CUDA source everything but PTX is what runs here: the host driver, the step kernel (Gram panels, T, update), the
whole-matrix kernel, the column-by-column kernels of one block and in memory. Not here: the cluster's column-by-column kernel
(st.async), and the products of tiles, which tests/host/product.h does in plain loops."""
import ctypes
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

import submission
from reference import generate_input, measure
from submission import CLUSTER, SINGLE, TALL, WHOLE, DeviceInfo, plan

HOST = Path(__file__).resolve().parent / "host"
SMALL = DeviceInfo((9, 0), 1, 232448, (0, 0, 0, 0))         # one block a matrix
WIDE = DeviceInfo((9, 0), 64, 232448, (32, 16, 0, 0))       # as many blocks as there are rows for, up to four


def host_source(product: str) -> str:
    sections = re.split(r"^// -{100,}\n// (.+)\n// -{100,}\n", submission.CUDA_SOURCE, flags=re.M)
    text = dict(zip(sections[1::2], sections[2::2]))
    products = next(body for title, body in text.items() if title.startswith("Products of"))
    kept = []
    for title, body in text.items():
        if title.startswith(("Shared device helpers", "geqr2 across a cluster")):
            continue
        if title.startswith("Products of"):
            body = products[products.index("enum class Form"):products.index("template <int kSums> struct MmaSync")] + (HOST / "product.h").read_text()
        if title.startswith("geqr2 in memory"):
            body = "constexpr int kMaxCluster = 16;\n" + body
        if title.startswith("Host driver"):
            body = re.sub(r"struct Launcher \{.*?^\};\n", "", body, flags=re.S | re.M)
            body = re.sub(r"template <int R> void geqr2_cluster\(.*?^\}\n", 'template <int R> void geqr2_cluster(Launcher& launch, const PanelArgs&, int, int) { launch.error = "not emulated"; }\n', body, flags=re.S | re.M)
            body = re.sub(r"^#if defined\(KITTENS_HOPPER\)\ntemplate <int kSums> using Products.*?^#endif\n", f"template <int kSums> using Products = {product}<kSums>;\n", body, flags=re.S | re.M)
            body = body[:body.index("// How many clusters of")]
        kept.append(body)
    source = "\n".join(kept)
    for ptx, plain in ((r'asm\("rsqrt\.approx(?:\.ftz)?\.f32 %0, %1;" : "=f"\((\w+)\) : "f"\((\w+)\)\);', r"\1 = 1.0f / sqrtf(\2);"),
                       (r'asm\("rcp\.approx(?:\.ftz)?\.f32 %0, %1;" : "=f"\((\w+)\) : "f"\((\w+)\)\);', r"\1 = 1.0f / \2;"),
                       (r'asm\("mov\.u32 %0, %%cluster_ctarank;" : "=r"\((\w+)\)\);', r"\1 = cluster_rank;"),
                       (r'asm\("mov\.u32 %0, %%cluster_nctarank;" : "=r"\((\w+)\)\);', r"\1 = cluster_ranks;"),
                       (r'asm(?: volatile)?\("" : [^;]*;', ""),
                       (r"extern __shared__ __align__\(\d+\) (\w+) (\w+)\[\];", r"\1* const \2 = reinterpret_cast<\1*>(block->shared);")):
        source = re.sub(ptx, plain, source)
    assert "asm" not in source, re.findall(r".*asm.*", source)
    return '#include "runtime.h"\n' + source


def build(folder: Path, product: str):
    compiler = shutil.which("g++")
    if not compiler:
        pytest.skip("g++ is not on PATH")
    (folder / "kernels.cpp").write_text(host_source(product))
    subprocess.run([compiler, "-std=c++20", "-O2", "-w", "-fPIC", "-shared", "-pthread", f"-I{HOST}", "kernels.cpp", "-o", "kernels.so"], cwd=folder, check=True)
    loaded = ctypes.CDLL(str(folder / "kernels.so"))
    loaded.qr_geqrf.restype = ctypes.c_char_p
    loaded.qr_work_bytes.restype = ctypes.c_long
    return loaded


@pytest.fixture(scope="session")
def library(tmp_path_factory):
    return build(tmp_path_factory.mktemp("host"), "HostProduct")


@pytest.fixture(scope="session")
def staged(tmp_path_factory):
    """With products whose operands are in shared memory and read late, as tcgen05's."""
    return build(tmp_path_factory.mktemp("staged"), "StagedProduct")


def factor(library, A, route):
    """(H, tau) by the host's threads; results and work space start as NaN."""
    batch, n, _ = A.shape
    A = A.contiguous()
    H, tau = torch.full_like(A, float("nan")), torch.full((batch, n), float("nan"))
    work = torch.full((library.qr_work_bytes(batch, n, submission._flat(route), len(route.steps)) + 128,), 255, dtype=torch.uint8)

    def pointer(tensor):
        return ctypes.c_void_p((tensor.data_ptr() + 127) // 128 * 128 if tensor is work else tensor.data_ptr())
    error = library.qr_geqrf(pointer(A), pointer(H), pointer(tau), pointer(work), batch, n, submission._flat(route), len(route.steps))
    assert error is None, error
    return H, tau


def check(library, batch, n, case, info, change=lambda route: route):
    A = generate_input(batch, n, 1, n, case, device="cpu")
    kept = A.clone()
    route = change(plan(batch, n, info, "mma"))
    output = factor(library, A, route._replace(steps=tuple(s._replace(kind=TALL) if s.kind == CLUSTER else s for s in route.steps)))
    figures = measure(A, output)
    assert figures.ok and figures.columnwise < (3 if n < 256 else 2) and figures.orthogonality < 10, figures.message
    assert torch.equal(A, kept)
    return output


@pytest.mark.parametrize("n", [1, 2, 7, 15, 16, 17, 33, 64, 100])
def test_whole_matrices(library, n):
    for case in ("dense", "rankdef", "upper"):
        H, tau = check(library, 2, n, case, SMALL)
        if case == "upper":
            assert not tau.any() and torch.equal(H, generate_input(2, n, 1, n, "upper", device="cpu"))


@pytest.mark.parametrize("n", [65, 128, 176, 192])
def test_whole_matrices_of_several_panels(library, n):
    """Panels from their Gram matrices, declined ones (nearcollinear, mixed) and empty ones (diagonal, rankdef)."""
    for case in ("dense", "rankdef", "upper", "diagonal", "nearcollinear", "mixed"):
        H, tau = check(library, 2 if case == "mixed" else 1, n, case, SMALL)
        if case in ("upper", "diagonal"):
            assert not tau.any() and torch.equal(H, generate_input(1, n, 1, n, case, device="cpu"))


@pytest.mark.parametrize("n", [40, 150])
def test_whole_matrices_that_are_not_finite(library, n):
    """They end, and leave the others alone."""
    A = generate_input(3, n, 1, n, "dense", device="cpu")
    A[0, 3, 5], A[2, n - 1, 0] = float("nan"), float("inf")
    H, tau = factor(library, A, plan(3, n, SMALL, "mma"))
    assert not H[0].isfinite().all() and measure(A[1:2], (H[1:2], tau[1:2])).columnwise < 3


def test_whole_matrix_of_extreme_scales(library):
    A = torch.randn(1, 40, 40, generator=torch.Generator().manual_seed(1))
    decades = torch.logspace(-34, 34, 40)
    for scaled in (A * decades, A * decades.flip(0), A * 1e-36, A * 1e36):
        figures = measure(scaled, factor(library, scaled, plan(1, 40, SMALL, "mma")))
        assert figures.columnwise < 1, figures.message


@pytest.mark.parametrize("n, info", [(193, SMALL), (256, SMALL), (323, SMALL), (258, WIDE), (320, WIDE), (513, WIDE)])
def test_panels_and_updates(library, n, info):
    check(library, 1, n, "dense", info)


@pytest.mark.parametrize("n", [299, 300])
def test_panels_and_updates_with_late_products(staged, n):
    check(staged, 1, n, "dense", WIDE._replace(clusters=(64, 32, 0, 0)))


@pytest.mark.parametrize("n", [330, 332])                    # without tensor maps, and with
def test_every_shape_of_the_update(library, n):
    """Slots refilled or not, columns dealt to one cluster or several, rows to one, two or four blocks, one to three warpgroups; the same for the panel kernel."""
    for ranks, chunks, slots, groups in ((1, 1, 2, 2), (1, 3, 3, 1), (2, 1, 2, 2), (2, 2, 3, 1), (4, 2, 2, 1)):
        def change(route):
            steps = [s if s.kind == WHOLE else s._replace(panel_ranks=ranks, larfb_ranks=min(ranks, -(-(n - s.column) // 64)),
                                                          chunks=min(chunks, s.chunks), slots=slots, groups=groups) for s in route.steps]
            return route._replace(steps=tuple(steps))
        check(library, 2 if ranks < 4 else 1, n, "dense", SMALL._replace(multiprocessors=1000), change)


@pytest.mark.parametrize("ranks, case", [(2, "dense"), (1, "mixed"), (1, "nearcollinear"), (1, "rankdef")])
def test_pairs_beside_updates(library, ranks, case):
    """Two panels in one launch, the columns of the next ones updated before the rest, and what becomes of declined panels."""
    def change(route):
        steps = [s if not s.panels or route.steps[i + 1].kind == WHOLE else
                 s._replace(**dict(zip(("larfb_ranks", "chunks", "slots", "groups", "ahead_ranks", "ahead_chunks", "ahead_slots", "ahead_groups"), (ranks, 1, 3, 1, 1, 1, 2, 1))))
                 for i, s in enumerate(s._replace(panel_ranks=ranks, gram=2 if s.gram and not s.panels else s.gram) for s in route.steps)]
        assert [s.gram for s in steps] == [2, 1, 2, 1, 1, 0] and sum(s.ahead_ranks > 0 for s in steps) == 2
        return route._replace(steps=tuple(steps))
    check(library, 1, 450, case, SMALL._replace(multiprocessors=2), change)


@pytest.mark.parametrize("kind, case", [(SINGLE, "mixed"), (SINGLE, "upper"), (TALL, "mixed"), (TALL, "upper")])
def test_declined_panels(library, kind, case):
    """Matrices that the Gram kernel declines go column by column, their neighbours do not; without Gram panels all do."""
    def change(route):
        return route._replace(steps=tuple(s if s.kind == WHOLE or kind == SINGLE else s._replace(kind=TALL, ranks=1, rows_per_lane=0) for s in route.steps))
    check(library, 3, 193, case, SMALL, change)
    check(library, 1, 193, case, SMALL, lambda route: change(route)._replace(steps=tuple(s._replace(gram=0) for s in change(route).steps)))


@pytest.mark.parametrize("kind", [SINGLE, TALL])
def test_declined_panels_of_extreme_scales(library, kind):
    n = 193
    A = torch.randn(1, n, n, generator=torch.Generator().manual_seed(1))
    route = plan(1, n, SMALL, "mma")
    steps = tuple(s._replace(gram=0) if s.kind == WHOLE or kind == SINGLE else s._replace(gram=0, kind=TALL, ranks=1, rows_per_lane=0) for s in route.steps)
    for scaled in (A * torch.logspace(-36, 36, n), A * torch.logspace(-36, 36, n)[torch.randperm(n, generator=torch.Generator().manual_seed(2))]):
        figures = measure(scaled, factor(library, scaled, route._replace(steps=steps)))
        assert figures.columnwise < 3, figures.message      # the update's: below 1e-35 the low bf16 part of C loses bits
