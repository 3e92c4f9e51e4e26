"""The Blackwell backend without a Blackwell card: its PTX rewritten for Hopper (tests/emulator) and run there.

Without a GPU: the rewritten sources hold no Blackwell instruction and assemble for sm_90a; unknown instructions are refused; every
fault of the list finds its place.
With a Hopper card: each product of tiles against float64, the factorization against the judge, and one fault after another
put into the PTX, each of which must be caught: by a stop with a message, or by numbers that are not right."""
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import submission
from reference import CASES

EMULATOR = Path(__file__).resolve().parent / "emulator"
sys.path.insert(0, str(EMULATOR))
import rewrite as rewriter  # noqa: E402

SECTIONS = re.split(r"^// -{100,}\n// (.+)\n// -{100,}\n", submission.CUDA_SOURCE, flags=re.M)   # what comes before, title, text, title, text, ...
PRODUCT_SOURCE = "".join(text for title, text in zip(SECTIONS[1::2], SECTIONS[2::2]) if re.match("Shared device helpers|Products of", title)) \
    + (EMULATOR / "products.cu").read_text()
PRODUCTS = {0: "start AB", 1: "exact AtB", 2: "exact AB", 3: "registers AB", 4: "registers ABt", 5: "registers AB twice", 6: "pairs AtB", 7: "pairs AB",
            8: "two sums at once", 9: "two sums in turn", 10: "registers and pairs"}
ENTRY = re.compile(r"^\.visible \.entry \w*product_kernel.*?(?=^\.visible |\Z)", re.M | re.S)   # faults go into this kernel


def flags():
    arch = [flag for flag in submission.nvcc_flags("tcgen05", (10, 0)) if not flag.startswith("-gencode") and flag != "-lineinfo"]
    return [*arch, f"-I{submission.find_thunderkittens()}"]


def sources(tmp_path_factory, text):
    if not shutil.which("nvcc"):
        pytest.skip("nvcc is not on PATH")
    try:
        return rewriter.Sources(text, flags(), tmp_path_factory.mktemp("tcgen05"))
    except submission.BuildError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def factorization(tmp_path_factory):
    """The production sources, all of them."""
    compiled = sources(tmp_path_factory, submission.CUDA_SOURCE)
    return compiled, compiled.library()


@pytest.fixture(scope="session")
def products(tmp_path_factory):
    """Their products of tiles, each for itself."""
    return sources(tmp_path_factory, PRODUCT_SOURCE)


hopper = pytest.mark.skipif(not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="the rewritten kernels run on compute capability 9.0")


# ---------------------------------------------------------------------------------------------------------------------
# Rewriting
# ---------------------------------------------------------------------------------------------------------------------


def test_rewritten_sources_assemble_for_hopper(factorization):
    ptx = (factorization[0].folder / "keep" / "qr.ptx").read_text()
    assert ".target sm_90a" in ptx and "tcgen05." not in ptx and ".f32x2" not in ptx
    for name in ("alloc", "dealloc", "mma", "commit", "wait", "ld", "store", "bulk_copy", "proxy_fence"):
        assert re.search(rf"call .*emulate_{name}\b", ptx), name


def kernel_of(*lines):
    return ".version 9.0\n.target sm_100a\n.address_size 64\n.visible .entry k(\n)\n{\n" + "\n".join(lines) + "\n}\n"


@pytest.mark.parametrize("instruction", [
    "tcgen05.mma.cta_group::2.kind::f16 [%r1], %rd1, %rd2, %r2, p;",
    "tcgen05.mma.cta_group::1.kind::tf32 [%r1], %rd1, %rd2, %r2, p;",
    "tcgen05.mma.cta_group::1.kind::f16 [%r1], [%r3], %rd2, %r2, p;",
    "tcgen05.ld.sync.aligned.32x32b.x8.b32 {%f1, %f2, %f3, %f4, %f5, %f6, %f7, %f8}, [%r1];",
    "tcgen05.ld.sync.aligned.16x256b.x2.b32 {%f1, %f2}, [%r1];",
    "tcgen05.st.sync.aligned.16x128b.x2.b32 [%r1], {%r2, %r3, %r4, %r5};",
    "tcgen05.cp.cta_group::1.32x128b.warpx4 [%r1], %rd1;",
    "@%p1 tcgen05.wait::ld.sync.aligned;",
    "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.b32 [%r1], %r3, [%r2];",
    "stmatrix.sync.aligned.m8n8.x1.shared.b16 [%r1], {%r2};",
    "@%p1 mbarrier.try_wait.parity.shared.b64 %p2, [%r1], %r2;",
    "fence.proxy.async;",
])
def test_what_is_not_modelled_is_refused(instruction):
    with pytest.raises(rewriter.NotModelled, match=re.escape(instruction[:15])):
        rewriter.rewrite(kernel_of("tcgen05.wait::ld.sync.aligned;", instruction), "")


def test_a_module_for_another_architecture_is_refused():
    with pytest.raises(rewriter.NotModelled):
        rewriter.rewrite(kernel_of("ret;").replace("sm_100a", "sm_90a"), "")


def test_a_load_is_delivered_at_its_wait():
    text = rewriter.rewrite(kernel_of("tcgen05.ld.sync.aligned.16x256b.x1.b32 {%f1, %f2, %f3, %f4}, [%r1];", "mov.b32 %r1, 0;", "tcgen05.wait::ld.sync.aligned;"), "")
    before, after = text.split("mov.b32 %r1, 0;")
    assert before.count(rewriter.NAN) == 4 and "emulate_ld" not in before and after.count("call (returned), emulate_ld") == 4
    assert "%emulated0" in before and after.count("%emulated0") == 4, "the address is that of the load, whatever became of its register"


def test_other_kernels_stay_as_they_are():
    plain = kernel_of("st.shared.f32 [%r1], %f1;", "ret;")
    assert rewriter.rewrite(plain, "") == plain.replace("sm_100a", "sm_90a")


# ---------------------------------------------------------------------------------------------------------------------
# On a Hopper card, each run in a process of its own: a stopped kernel ends the process's use of the device
# ---------------------------------------------------------------------------------------------------------------------

CHILD = """
import ctypes, sys, torch
library, kind, groups = ctypes.CDLL(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
g = torch.Generator("cuda").manual_seed(kind)
A, B = (torch.randn(4, 64, 64, generator=g, device="cuda") * torch.logspace(0, -3, 64, device="cuda") for _ in range(2))
out = torch.full((2, 4, 64, 64), float("nan"), device="cuda")
pointer = lambda t: ctypes.c_void_p(t.data_ptr())
torch.cuda.synchronize()
for _ in range(2):                                       # twice: the second launch finds what the first did not release
    status = library.run_products(kind, groups, pointer(A), pointer(B), pointer(out))
    if status:
        sys.exit(f"CUDA error {status}")
a, b = A[:groups].double(), B[:groups].double()
if kind == 0:
    b = b[:1].expand_as(b)
want, size = a @ b, a.abs() @ b.abs()
if kind == 5:
    want, size = 2 * want, 2 * size
error = ((out[0, :groups].double() - want).abs() / size).max().item()
if kind >= 8:
    right = B.roll(-1, 0)[:groups].double()
    left = 2 * b.mT if kind == 10 else a
    error = max(error, ((out[1, :groups].double() - left @ right).abs() / (left.abs() @ right.abs())).nan_to_num(1).max().item())
print("error", error)
sys.exit(0 if error < (2 ** -21 if kind in (1, 2) else 2 ** -15) else "wrong result")
"""


def run_products(library, kind, groups, timeout=120):
    return subprocess.run([sys.executable, "-c", CHILD, str(library), str(kind), str(groups)], capture_output=True, text=True, timeout=timeout)


@hopper
@pytest.mark.gpu
@pytest.mark.parametrize("kind", PRODUCTS, ids=PRODUCTS.values())
def test_products(products, kind):
    for groups in (2,) if kind == 0 else (1, 2, 4):
        done = run_products(products.built(), kind, groups)
        assert done.returncode == 0, done.stdout + done.stderr


class Fault:
    """A textual change, of the PTX or (`in_source`) of the CUDA source, that must change something and be caught in a product of this kind."""

    def __init__(self, kind, pattern, replacement, in_source=False):
        self.kind, self.pattern, self.replacement, self.in_source = kind, pattern, replacement, in_source

    def __call__(self, text):
        place = text if self.in_source else ENTRY.search(text)[0]
        changed = re.sub(self.pattern, self.replacement, place)
        assert changed != place, f"nothing to change: {self.pattern}"
        return text.replace(place, changed)


K_MAJOR, N_MAJOR, IDESC_AB = 0x4000404000010000, 0x4000404002000000, 0x04110490
WAIT = r"mbarrier\.try_wait\.parity\.shared::cta\.b64\s+P1, \[%r\d+\], %r\d+;"
ISSUER = r"if \(threadIdx\.x % 128 == 0\) \{"
FAULTS = {
    "swapped byte offsets": Fault(3, str(K_MAJOR), str(0x4000400100400000)),
    "wrong stride": Fault(1, str(N_MAJOR), str(0x4000402002000000)),
    "wrong swizzle mode": Fault(3, str(K_MAJOR), str(0x8000404000010000)),
    "operands in another swizzle": Fault(3, r"\(row & 7\) << 4", "(row & 3) << 4", in_source=True),
    "wrong constant": Fault(3, str(K_MAJOR), str(0x4000004000010000)),
    "base offset": Fault(3, str(K_MAJOR), str(0x4002404000010000)),
    "operand K-major not at its swizzle's start": Fault(3, str(K_MAJOR), str(K_MAJOR + 8)),
    "operand N-major not at its swizzle's start": Fault(1, str(N_MAJOR), str(N_MAJOR + 2)),
    "wrong N": Fault(3, str(IDESC_AB), str(0x04090490)),
    "wrong M": Fault(3, str(IDESC_AB), str(0x08110490)),
    "wrong major": Fault(3, str(IDESC_AB), str(0x04100490)),
    "wrong operand format": Fault(3, str(IDESC_AB), str(0x04110010)),
    "wrong phase": Fault(3, WAIT.replace(r"%r\d+;", r"(%r\d+);"), lambda wait: wait[0].replace(f"{wait[1]};", "1;")),
    "phase not turned": Fault(5, r"group_products & 1", "0", in_source=True),
    "wrong lane quarter": Fault(3, r"(tcgen05\.ld[^;]*)\[(%r\d+)\]", r"xor.b32 \2, \2, 2097152;\n\1[\2]"),
    "wrong half of a lane quarter": Fault(3, r"threadIdx\.x / 128 % 2, 128", "0, 128", in_source=True),
    "wrong column": Fault(3, r"(tcgen05\.ld[^;]*)\[(%r\d+)\]", r"add.s32 \2, \2, 8;\n\1[\2]"),
    "missing commit": Fault(3, r"tcgen05\.commit[^;]*;", ""),
    "commit by another thread": Fault(3, r"threadIdx\.x % 128 == 0\) kittens::tensor_commit", "threadIdx.x % 128 == 32) kittens::tensor_commit", in_source=True),
    "missing wait for a commit": Fault(3, WAIT, "setp.eq.u32 P1, 1, 1;"),
    "missing wait for a load": Fault(3, r"tcgen05\.wait::ld[^;]*;", ""),
    "missing fence after a wait": Fault(3, r"tcgen05\.fence::after_thread_sync;", ""),
    "missing proxy fence": Fault(3, r"fence\.proxy\.async\.shared::cta;", ""),
    "missing proxy fence, three parts": Fault(1, r"fence\.proxy\.async\.shared::cta;", ""),
    "proxy fence of the issuing thread alone": Fault(3, r'asm volatile\("fence\.proxy\.async[^;]*;" ::: "memory"\);', "", in_source=True),
    "several threads issue": Fault(3, ISSUER, "if (threadIdx.x % 128 < 2) {", in_source=True),
    "several warps issue": Fault(3, ISSUER, "if (threadIdx.x % 32 == 0) {", in_source=True),
    "columns not allocated": Fault(8, r"(tcgen05\.(?:de)?alloc[^;]*), 256;", r"\1, 128;"),
    "other columns released": Fault(3, r"(tcgen05\.dealloc[^;]*), 256;", r"\1, 128;"),
    "no power of two": Fault(3, r"(tcgen05\.(?:de)?alloc[^;]*), 256;", r"\1, 192;"),
    "missing release": Fault(3, r"tcgen05\.dealloc[^;]*;", ""),
    "never cleared": Fault(5, r"setp\.eq\.u32 p, 1, 0;", "setp.eq.u32 p, 1, 1;"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_each_fault_has_its_place(products, fault):
    FAULTS[fault](PRODUCT_SOURCE if FAULTS[fault].in_source else products.ptx)


@hopper
@pytest.mark.gpu
@pytest.mark.parametrize("fault", FAULTS)
def test_each_fault_is_caught(products, tmp_path_factory, fault):
    change = FAULTS[fault]
    if change.in_source:
        library = sources(tmp_path_factory, change(PRODUCT_SOURCE)).library()
    else:
        library = products.library(re.sub(r"\W", "_", fault) + ".so", change)
    done = run_products(library, change.kind, 2)
    said = done.stdout + done.stderr
    print(said[-500:])
    assert done.returncode != 0 and ("tcgen05 emulator:" in said or "wrong result" in said), said
    assert "AttributeError" not in said and "OSError" not in said, said


FACTOR = """
import ctypes, sys, torch
sys.path.insert(0, sys.argv[2])
import submission
from reference import CASES, generate_input, measure
from submission import DeviceInfo, _flat, plan
library = ctypes.CDLL(sys.argv[1])
library.qr_geqrf.restype = ctypes.c_char_p
library.qr_work_bytes.restype = ctypes.c_long
info = DeviceInfo((10, 0), 132, 232448, tuple(library.qr_resident_clusters(ranks) for ranks in submission.CLUSTER_SIZES))
pointer = lambda t: ctypes.c_void_p(t.data_ptr())

def factor(A):
    batch, n, _ = A.shape
    H, tau = torch.full_like(A, float("nan")), torch.full(A.shape[:2], float("nan"), device="cuda")
    route = plan(batch, n, info, "tcgen05")
    work = torch.empty(library.qr_work_bytes(batch, n, _flat(route), len(route.steps)), dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    error = library.qr_geqrf(pointer(A), pointer(H), pointer(tau), pointer(work), batch, n, _flat(route), len(route.steps))
    if error:
        sys.exit(error.decode())
    torch.cuda.synchronize()
    return H, tau

for n, batch, case in eval(sys.argv[3]):
    A = generate_input(batch, n, 1, n + batch, case)
    H, tau = factor(A)
    figures = measure(A, (H, tau))
    if not (figures.ok and figures.columnwise < (3 if n < 256 else 2)):
        sys.exit(f"{n} {batch} {case}: {figures.message}")
    real, real_tau = submission.custom_kernel(A)
    size = torch.linalg.matrix_norm(A, ord=1)[:, None, None].clamp(min=1e-30)
    apart = ((H - real).triu().abs() / size).max().item()
    print(n, batch, case, figures.message, "apart", apart, flush=True)
    if case in ("dense", "upper", "diagonal") and not apart < 20 * n * 2 ** -23:
        sys.exit(f"{n} {batch} {case}: differs from the {submission.plan_for(A).backend} backend's R by {apart:.2g} of the norm")
"""


@hopper
@pytest.mark.gpu
@pytest.mark.parametrize("n", [64, 100, 128, 129, 176, 256, 299, 300, 512])
def test_factorization(factorization, n):
    cases = [(n, batch, case) for batch, case in [(1, "dense"), (2, "dense"), *((3, case) for case in CASES)]]
    done = subprocess.run([sys.executable, "-c", FACTOR, str(factorization[1]), str(EMULATOR.parent.parent), repr(cases)], capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert done.stdout.count("apart") == len(cases)
