"""submission.py without a GPU: arguments, routes, board law, sources for every architecture, each message of a failed build."""
import array
import functools
import os
import re
import shutil
import site
import subprocess
import sys
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import kernelguard
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import submission
from submission import CLUSTER, PANEL, SINGLE, TALL, WHOLE, BuildError, DeviceInfo, Plan, custom_kernel, plan

ROOT = Path(submission.__file__).resolve().parent
TEXT = (ROOT / "submission.py").read_text()
H200 = DeviceInfo((9, 0), 132, 232448, (66, 30, 14, 7))
B200 = DeviceInfo((10, 0), 148, 232448, (74, 36, 16, 8))
A100 = DeviceInfo((8, 0), 108, 166912, (0, 0, 0, 0))
LEAST = DeviceInfo((8, 0), 20, submission.BLOCKED_SHARED, (0, 0, 0, 0))   # the smallest device that factors by panels
KERNELS = set(re.findall(r"__global__ void __launch_bounds__\([^)]*\) (\w+)\(", submission.CUDA_SOURCE))

# ---------------------------------------------------------------------------------------------------------------------
# Arguments
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad, error, words", [
    ([[1.0]], TypeError, ("torch.Tensor", "list")),
    (None, TypeError, ("torch.Tensor", "NoneType")),
    (torch.zeros(3, 3), ValueError, ("(batch, n, n)", "(3, 3)")),
    (torch.zeros(2, 3, 4), ValueError, ("(batch, n, n)", "(2, 3, 4)")),
    (torch.zeros(2, 2, 3, 3), ValueError, ("(2, 2, 3, 3)",)),
    (torch.zeros(()), ValueError, ("()",)),
    *[(torch.zeros(2, 3, 3, dtype=dtype), TypeError, ("torch.float32", str(dtype)))
      for dtype in (torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.int32, torch.bool)],
    (torch.zeros(2, 3, 3, device="meta"), ValueError, ("meta",)),
    (torch.zeros(2, 3, 3).to_sparse(), ValueError, ("sparse",)),
])
def test_bad_argument_is_named(bad, error, words):
    for call in (custom_kernel, submission.plan_for):
        with pytest.raises(error, match="^A: expected") as caught:
            call(bad)
        for word in words:
            assert word in str(caught.value)


@pytest.mark.parametrize("shape", [(0, 4, 4), (3, 0, 0), (0, 0, 0), (5, 1, 1), (2, 7, 7)])
def test_cpu_tensor_is_factored_by_geqrf(shape):
    A = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    kept = A.clone()
    H, tau = custom_kernel(A)
    want = torch.geqrf(A)
    assert type(custom_kernel(A)) is tuple and H.shape == shape and tau.shape == shape[:2]
    assert torch.equal(H, want[0]) and torch.equal(tau, want[1]) and torch.equal(A, kept)
    assert submission.plan_for(A).reason == "A is on cpu"


def test_strides_of_a_cpu_tensor_do_not_matter():
    A = torch.randn(3, 9, 9, generator=torch.Generator().manual_seed(2))
    for view in (A.mT, A.flip(0), A[::2], A.expand(3, 9, 9)):
        assert all(map(torch.equal, custom_kernel(view), torch.geqrf(view.contiguous())))


def test_no_derivative():
    A = torch.randn(2, 5, 5, requires_grad=True)
    with pytest.raises(RuntimeError):
        custom_kernel(A)[0].sum().backward()


# ---------------------------------------------------------------------------------------------------------------------
# Route
# ---------------------------------------------------------------------------------------------------------------------

SIZES = [*range(1, 20), 31, 32, 33, 63, 64, 65, 95, 96, 127, 128, 129, 160, 176, 191, 192, 193, 200, 255, 256, 257, 300, 352, 384, 511, 512, 513,
         700, 1000, 1024, 1025, 1500, 2048, 2500, 4095, 4096, 8192, 8193, 16384, 40000]
BATCHES = [1, 2, 3, 7, 8, 20, 40, 60, 132, 133, 640, 4096]


@functools.cache
def instances(launcher: str) -> set[int]:
    """The values of rows_per_lane for which the host driver has an instance of a kernel."""
    return {int(value) for value in re.findall(rf"case (\d+): {launcher}<", submission.CUDA_SOURCE)}


@functools.cache
def source_constant(name: str) -> int:
    return int(re.search(rf"\b{name} = (\d+)[,;]", submission.CUDA_SOURCE)[1])


@functools.cache
def larfb_shared_bytes(panels: int, slots: int, groups: int, staged: bool) -> int:
    """The source's own formula."""
    formula = re.search(r"int larfb_shared_bytes\(int panels, int slots, int groups, bool staged\) \{\s*return (.+?);\s*\}", submission.CUDA_SOURCE)[1]
    formula = re.sub(r"\((\w+) \? (\w+) : (\w+)\)", r"(\2 if \1 else \3)", formula)
    return eval(formula, {"kPairBytes": 2 * 64 * 64 * 2, "panels": panels, "slots": slots, "groups": groups, "staged": staged})


def check_larfb(shape: tuple[int, int, int, int], rows: int, panels: int, units: int, info: DeviceInfo, backend: str):
    """The launch exists, each block has rows, each warpgroup columns in its first round, and V's tiles two slots or one each."""
    ranks, chunks, slots, groups = shape
    tiles = -(-rows // 64)
    assert 1 <= units <= tiles - panels
    assert ranks in (1, 2, 4, 8, 16) and ranks <= info.max_cluster and ranks <= tiles and info.resident(ranks) > 0
    assert 1 <= chunks <= units and 1 <= groups <= source_constant("kLarfbGroups") and groups <= units // chunks
    assert 1 <= slots <= source_constant("kLarfbSlots") and min(2, -(-tiles // ranks)) <= slots <= -(-tiles // ranks)
    assert larfb_shared_bytes(panels, slots, groups, backend == "tcgen05") <= info.shared_bytes


def check_route(route: Plan, batch: int, n: int, info: DeviceInfo, backend: str):
    """Every column is factored once, in order, and updated by each panel left of it once, by kernels that hold the rows they are given."""
    assert route.backend == backend and not route.reason
    *panels, last = route.steps
    assert [step.column for step in route.steps] == list(range(0, PANEL * len(route.steps), PANEL))
    assert last.kind == WHOLE and 0 < n - last.column <= submission.WHOLE_LIMIT and 4 * last.rows_per_lane >= n - last.column > 4 * last.rows_per_lane - 16
    assert last.rows_per_lane in instances("geqr2_whole")
    assert last == submission.Step(WHOLE, last.column, last.rows_per_lane, 1), "nothing right of it to update"
    assert not panels or n > submission.WHOLE_LIMIT, "a matrix that fits one block is one launch"
    waiting = []                                                          # panels not yet applied to what is right of the newest
    for i, step in enumerate(panels):
        rows = n - step.column
        assert rows > PANEL, "a panel has 64 columns and something right of it"
        assert step.gram == 1 + (not step.panels and i > 0 and panels[i - 1].ahead_ranks > 0), "a pair is one launch beside an update"
        assert step.panel_ranks in (1, 2, 4, 8, 16) and step.panel_ranks <= min(info.max_cluster, -(-rows // 64) + len(waiting))
        assert step.panel_ranks == 1 or batch <= info.resident(step.panel_ranks)
        assert 1 <= step.ranks <= info.max_cluster and step.ranks & (step.ranks - 1) == 0
        if step.kind == TALL:
            assert rows > submission.BLOCK_ROWS * step.ranks and step.ranks == info.max_cluster
        else:
            assert step.rows_per_lane in instances({SINGLE: "geqr2", CLUSTER: "geqr2_cluster"}[step.kind])
            assert 32 * step.rows_per_lane * step.ranks >= rows and (step.kind == SINGLE) == (step.ranks == 1)
        waiting.append(step)
        if step.panels:
            assert step.panels == len(waiting) in (1, 2), "no panel is applied twice or forgotten"
            units, ahead = -(-(rows - PANEL) // PANEL), 0
            if step.ahead_ranks:
                assert info.capability >= (9, 0) and i + 1 < len(panels)
                ahead = 1 if panels[i + 1].panels else 2
                assert batch * panels[i + 1].panel_ranks < info.multiprocessors, "the rest of the update has multiprocessors"
                check_larfb(step[11:], n - waiting[0].column, step.panels, ahead, info, backend)
            else:
                assert step[11:] == (0, 0, 0, 0)
            check_larfb(step[7:11], n - waiting[0].column, step.panels, units - ahead, info, backend)
            waiting.clear()
        else:
            assert len(waiting) == 1 and step is not panels[-1], "only a panel that updates itself follows"
            assert step[7:] == 8 * (0,) and step.panel_ranks == panels[i + 1].panel_ranks, "a pair"
    assert not waiting, "the last block takes no update"
    assert plan(batch, n, info, backend) == route, "pure"


DEVICES = [(H200, "wgmma"), (H200, "mma"), (B200, "tcgen05"), (A100, "mma"), (LEAST, "mma"),
           (LEAST._replace(capability=(10, 0), clusters=(10, 5, 2, 1)), "tcgen05"),
           (H200._replace(clusters=(66, 30, 14, 0)), "wgmma"), (H200._replace(multiprocessors=7, clusters=(3, 1, 0, 0)), "wgmma")]


@pytest.mark.parametrize("info, backend", DEVICES)
def test_route_over_a_grid(info, backend):
    for n in SIZES:
        for batch in BATCHES[::2] if n < 1000 else (1, 60) if n < 9000 else (1,):
            check_route(plan(batch, n, info, backend), batch, n, info, backend)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 2000), st.integers(1, 20000), st.integers(1, 200), st.sampled_from([1, 2, 4, 8, 16]), st.integers(submission.BLOCKED_SHARED, 256 << 10),
       st.sampled_from(list(submission.BACKENDS)))
def test_route_anywhere(batch, n, multiprocessors, max_cluster, shared_bytes, backend):
    info = DeviceInfo((9, 0), multiprocessors, shared_bytes, tuple(max(1, multiprocessors // r) if r <= max_cluster else 0 for r in submission.CLUSTER_SIZES))
    check_route(plan(batch, n, info, backend), batch, n, info, backend)


@pytest.mark.parametrize("info, backend", DEVICES)
def test_larfb_shape_alone(info, backend):
    """Any update, also one that no plan has now: from one tile right of the panels, on some or all multiprocessors."""
    for panels in (1, 2):
        for rows in [64 * panels + 1, 64 * panels + 64, 64 * panels + 65, *range(200, 1400, 151), 4096, 4097]:
            most = -(-rows // 64) - panels
            for batch in BATCHES:
                for units, multiprocessors in ((most, info.multiprocessors), (min(2, most), info.multiprocessors), (most, 1)):
                    cycles, shape = submission.larfb_shape(batch, rows, panels, units, multiprocessors, info, backend)
                    check_larfb(shape, rows, panels, units, info, backend)
                    assert cycles > 0


def test_larfb_fills_the_device():
    """One matrix is dealt to many blocks, and never to more than are resident; a batch larger than the device is not split at all."""
    for info, backend in DEVICES:
        for panels in (1, 2):
            _, (ranks, chunks, *_) = submission.larfb_shape(1, 4096, panels, 64 - panels, info.multiprocessors, info, backend)
            assert info.multiprocessors / 4 < ranks * chunks and chunks <= info.resident(ranks)
            assert submission.larfb_shape(100 * info.multiprocessors, 512, panels, 8 - panels, info.multiprocessors, info, backend)[1][:2] == (1, 1)


def test_figures_of_the_plan_are_the_source_s():
    assert submission.LARFB_GROUPS == source_constant("kLarfbGroups") and submission.LARFB_SLOTS == source_constant("kLarfbSlots")
    assert submission.PANEL == source_constant("kPanelWidth") and submission.PAIR == 2 * 64 * 64 * 2
    assert larfb_shared_bytes(2, 2, 2, True) == 1024 + (2 * 2 + 3 + 6) * 16384 and larfb_shared_bytes(1, 1, 1, False) == 1024 + 4 * 16384


def test_routes_to_geqrf_say_why():
    assert plan(2, 100, H200, "geqrf").reason == "torch.geqrf was asked for"
    small = H200._replace(shared_bytes=100 << 10)
    assert plan(2, 128, small, "mma").steps and "129" in plan(2, 129, small, "mma").reason and "102400" in plan(2, 129, small, "mma").reason
    assert "batch = 3000000000" in plan(3_000_000_000, 2, H200, "wgmma").reason
    for route in (plan(2, 100, H200, "geqrf"), plan(2, 129, small, "mma"), plan(3_000_000_000, 2, H200, "wgmma")):
        assert route.backend == "geqrf" and route.steps == ()


def test_ranked_sizes_are_no_special_case():
    """Neighbours of a ranked shape take the same kernels, up to where the last panel ends."""
    def kernels(batch, n, count):
        return [s._replace(column=0) for s in plan(batch, n, H200, "wgmma").steps[:count]]
    for batch, n in ((20, 32), (40, 176), (40, 352), (640, 512), (60, 1024), (8, 2048), (2, 4096)):
        count = max(1, n // PANEL - 3)
        assert kernels(batch, n, count) == kernels(batch, n - 1, count) == kernels(batch + (batch > 100), n, count), (batch, n)


def test_steps_are_flattened_as_the_host_driver_reads_them():
    route = plan(60, 1024, H200, "wgmma")
    flat = array.array("i", submission._flat(route)).tolist()
    size = int(re.search(r"kStepInts = (\d+)", submission.CUDA_SOURCE)[1])
    assert size == len(submission.Step._fields) and f"/ ({size} * sizeof(int))" in submission.CPP_SOURCE
    assert len(flat) == size * len(route.steps) and flat[size:2 * size] == list(route.steps[1])
    kinds = re.search(r"enum StepKind \{(.*?)\}", submission.CUDA_SOURCE)[1]
    assert [int(x) for x in re.findall(r"= (\d)", kinds)] == [WHOLE, SINGLE, CLUSTER, TALL]


# ---------------------------------------------------------------------------------------------------------------------
# Board law and the map
# ---------------------------------------------------------------------------------------------------------------------


def test_forbidden_letters_do_not_occur():
    assert "".join(("s", "tream")) not in TEXT.lower()
    assert "".join(("s", "tream")) not in (submission.CUDA_SOURCE + submission.CPP_SOURCE).lower()


def test_kernelguard_matches_nothing():
    verdict = kernelguard.analyze_code(TEXT)
    assert verdict["matched_patterns"] == [] and verdict["classification"] == "valid" and not verdict["should_filter"]
    cheat = "_seen = {}\ndef custom_kernel(data):\n    k = data.data_ptr()\n    if k in _seen:\n        return _seen[k]\n    _seen[k] = torch.geqrf(data)\n    return _seen[k]\n"
    assert kernelguard.analyze_code(cheat)["matched_patterns"], "the scanner itself works"


def test_file_map_names_what_exists():
    names = []
    for line in re.search(r"File map\n(.*?)\n\n", submission.__doc__, re.S)[1].splitlines():
        listed = line.split(":", 1)[1]
        named = re.findall(r"\(([\w, ]+)\)", listed)                      # in parentheses: more names, or words about the one before
        names += [name.strip() for part in [re.sub(r"\([^)]*\)", "", listed), *(x for x in named if re.fullmatch(r"\w+(, \w+)*", x))] for name in part.split(",")]
    assert len(names) > 20 and KERNELS - {"panel_kernel"} <= set(names)
    for name in names:
        assert re.search(rf"(def|class|struct) {name}\b|\b{name}\(", TEXT.split('"""', 2)[2]), name


def test_launch_names_are_the_kernels():
    """The name that an error would report is the kernel's, and every kernel is launched."""
    launches = re.findall(r'launch\("(\w+)", (.*?)[,\n]\s*(?:static_cast|blocks|batch)', submission.CUDA_SOURCE, re.S)
    for said, kernels in launches:
        assert set(re.findall(r"\w+_kernel", kernels)) == {said}
    assert {said for said, _ in launches} == KERNELS and len(launches) == submission.CUDA_SOURCE.count('launch("')


# ---------------------------------------------------------------------------------------------------------------------
# The CUDA sources, compiled for every architecture
# ---------------------------------------------------------------------------------------------------------------------

TARGETS = {"mma": (8, 0), "wgmma": (9, 0), "tcgen05": (10, 0)}
INSTRUCTIONS = {"mma": "mma.sync.aligned.m16n8k16.row.col.f32.bf16", "wgmma": "wgmma.mma_async", "tcgen05": "tcgen05.mma"}
PRODUCTS = {"mma": "7MmaSync", "wgmma": "5Wgmma", "tcgen05": "7Tcgen05"}   # mangled
# Dynamic shared memory, readable in the PTX: of a panel, and of the smallest updates by one and two panels, of which most fit a multiprocessor.
FIGURES = """
extern "C" __device__ const int panel_kernel_bytes = PanelShared::kBytes;
extern "C" __device__ const int larfb_kernel_1_bytes = larfb_shared_bytes(1, 1, 1, Products<2>::kStaged);
extern "C" __device__ const int larfb_kernel_2_bytes = larfb_shared_bytes(2, 1, 1, Products<3>::kStaged);
"""


@pytest.fixture(scope="session")
def ptx(tmp_path_factory):
    """Backend -> PTX, compiled with the flags of the build (nvcc, no torch header); "folder": of the files."""
    if not shutil.which("nvcc"):
        pytest.skip("nvcc is not on PATH")
    try:
        kittens = submission.find_thunderkittens()
    except BuildError as error:
        pytest.skip(str(error))
    folder = tmp_path_factory.mktemp("ptx")
    source = folder / "qr.cu"
    source.write_text(submission.CUDA_SOURCE + FIGURES)

    def compile_for(backend):
        out = folder / f"{backend}.ptx"
        flags = [flag.replace("-gencode=arch=", "-arch=").split(",")[0] for flag in submission.nvcc_flags(backend, TARGETS[backend])]
        done = subprocess.run(["nvcc", "-ptx", *flags, f"-I{kittens}", str(source), "-o", str(out)], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert "warning" not in done.stderr, done.stderr
        return out.read_text()

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return {"folder": folder, **dict(zip(TARGETS, pool.map(compile_for, TARGETS)))}


@pytest.mark.parametrize("backend", TARGETS)
def test_ptx_holds_the_backends_instruction(ptx, backend):
    """Whole matrices are mma.sync's on every card."""
    text = ptx[backend]
    assert f".target sm_{TARGETS[backend][0]}{TARGETS[backend][1]}" in text
    for name, body in bodies(text).items():
        for other, instruction in INSTRUCTIONS.items():
            products = "geqr2_whole" in name and other == "mma" or re.search("(panel|pair|larfb)_kernel", name) and other == backend
            assert (instruction in body) == bool(products), (name, other)


def bodies(text: str) -> dict[str, str]:
    """Kernels of a module: mangled name -> PTX."""
    return {re.match(r"\w+", entry)[0]: entry for entry in text.split(".visible .entry ")[1:]}


def entries(text: str) -> set[str]:
    """Kernels of a module: their names and template arguments, mangled."""
    return {name.removeprefix("_Z").lstrip("0123456789").split("EEv")[0] for name in re.findall(r"\.entry (\w+)\(", text)}


@pytest.mark.parametrize("backend", TARGETS)
def test_every_kernel_is_compiled(ptx, backend):
    """Each instance that the host driver may launch, with the backend's products, and no other."""
    want = {f"geqr2_whole_kernelILi{rows // 4}" for rows in instances("geqr2_whole")} | {f"geqr2_cluster_kernelILi{rows}" for rows in instances("geqr2_cluster")}
    want |= {f"geqr2_kernelILi{rows}ELi{columns}ELi{warps}" for rows, columns, warps in re.findall(r"geqr2<(\d+), (\d+), (\d+)>", submission.CUDA_SOURCE)}
    want |= {f"larfb_kernelI{PRODUCTS[backend]}ILi{panels + 1}EELi{panels}ELb{boxes}" for panels in (1, 2) for boxes in ((0,) if backend == "mma" else (0, 1))}
    want |= {f"panel_kernelI{PRODUCTS[backend]}ILi2EELb{aligned == 'true':d}ELi{blocks}"
             for aligned, blocks in re.findall(r"panel_kernel<Products<2>, (\w+), (\d)>", submission.CUDA_SOURCE)}
    want |= {f"pair_kernelI{PRODUCTS[backend]}ILi2EELb{aligned}" for aligned in (0, 1)}
    found = entries(ptx[backend])
    tall = {name for name in found if name.startswith("geqr2_tall_kernel")}
    assert len(tall) == 1 and found - tall == want
    assert {re.match(r"\w*?_kernel", name)[0] for name in found} == KERNELS


class Compiled(NamedTuple):
    """What ptxas says of a kernel."""
    registers: int
    stores: int      # spilled bytes
    loads: int
    shared: int      # static shared memory, bytes


def assemble(path: Path, target: str, out: Path) -> dict[str, Compiled]:
    said = subprocess.run(["ptxas", "-v", f"-arch={target}", str(path), "-o", str(out)], capture_output=True, text=True)
    assert said.returncode == 0, said.stderr
    figures = {}
    for name, stores, loads, used in re.findall(r"Function properties for (\w+_kernel\w*)\s+\d+ bytes stack frame, (\d+) bytes spill stores, "
                                                r"(\d+) bytes spill loads\s+ptxas info\s+: Used (.+)", said.stderr):
        shared = re.search(r"(\d+) bytes smem", used)
        figures[name] = Compiled(int(used.split()[0]), int(stores), int(loads), int(shared[1]) if shared else 0)
    return figures


@pytest.fixture(scope="session")
def assembled(ptx):
    """ptxas's figures of every kernel by target, in parallel: each backend's own, and sm_103a with the PTX of sm_100a, which nvcc makes the same."""
    text = ptx["tcgen05"]
    (ptx["folder"] / "sm_103a.ptx").write_text(text.replace(".target sm_100a", ".target sm_103a"))
    jobs = {f"sm_{major}{minor}{'' if backend == 'mma' else 'a'}": backend for backend, (major, minor) in TARGETS.items()} | {"sm_103a": "sm_103a"}
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        done = pool.map(lambda target: assemble(ptx["folder"] / f"{jobs[target]}.ptx", target, ptx["folder"] / f"{target}.cubin"), jobs)
        return dict(zip(jobs, done))


@pytest.mark.parametrize("target, backend", [("sm_80", "mma"), ("sm_90a", "wgmma"), ("sm_100a", "tcgen05"), ("sm_103a", "tcgen05")])
def test_registers_suffice(ptx, assembled, target, backend):
    """No spills where wgmma and tcgen05 are used, a few words at most in the column-by-column kernels. mma.sync's fragments and operands are all
    registers: there a few hundred bytes may go to memory."""
    assert len(assembled[target]) == len(entries(ptx[backend]))
    for name, kernel in assembled[target].items():
        limit = 16 if "geqr2" in name else 2048 if backend == "mma" else 0
        assert kernel.stores <= limit and kernel.loads <= 2 * limit, (name, kernel)


# A multiprocessor of a B200: registers, bytes of shared memory (of which a block may have 227 KiB, and each has 1 KiB more than it asks for), columns.
REGISTERS, SHARED, COLUMNS = 65536, 228 << 10, 512


@pytest.mark.parametrize("target", ["sm_100a", "sm_103a"])
def test_blocks_fit_a_blackwell_multiprocessor(ptx, assembled, target):
    """Registers and shared memory of one block, and tensor memory of as many blocks as registers, threads and shared memory let in at once."""
    texts = bodies(ptx["tcgen05"])
    with_tensor_memory = 0
    for name, kernel in assembled[target].items():
        text = texts[name]
        threads = int(re.search(r"\.maxntid (\d+)", text)[1])
        per_warp = -(-kernel.registers * 32 // 256) * 256
        blocks = min(2048 // threads, REGISTERS // (per_warp * threads // 32))
        assert blocks >= int(re.search(r"\.minnctapersm (\d+)", text)[1]) >= 1, name
        assert kernel.registers <= 255 and kernel.shared <= 48 << 10, name
        taken = {int(columns) for columns in re.findall(r"tcgen05\.alloc\.[^;]*, (\d+);", text)}
        assert bool(taken) == ("tcgen05.mma" in text) == ("tcgen05.dealloc" in text) == ("tcgen05.relinquish_alloc_permit" in text), name
        if taken:
            with_tensor_memory += 1
            figure = "panel_kernel" if re.search("(panel|pair)_kernel", name) else f"larfb_kernel_{re.search(r'EELi(.)ELb', name)[1]}"
            dynamic = int(re.search(rf"{figure}_bytes = (\d+);", ptx["tcgen05"])[1])
            assert dynamic + kernel.shared <= 227 << 10, name
            blocks = min(blocks, SHARED // (dynamic + kernel.shared + 1024))
            assert blocks * taken.pop() <= COLUMNS and not taken, f"{name}: {blocks} blocks"
    assert with_tensor_memory == 9


def disassembler() -> str:
    """nvdisasm, of the CUDA toolkit or of a package beside torch's."""
    places = [path for folder in site.getsitepackages() for path in Path(folder).glob("nvidia/*/bin/nvdisasm")]
    found = shutil.which("nvdisasm") or next(map(str, places), None)
    if not found:
        pytest.skip("nvdisasm is neither on PATH nor installed (pip install nvidia-cuda-nvdisasm)")
    return found


TENSOR_MEMORY = {"UTCATOMSWS", "UTCHMMA", "UTCBAR", "LDTM"}   # machine instructions: allocate and release, multiply, commit, load


@pytest.mark.parametrize("target", ["sm_100a", "sm_103a"])
def test_machine_code_holds_tensor_memory_instructions(ptx, assembled, target):
    """In the kernels that make products and in no other; none of this backend uses an older card's products."""
    said = subprocess.run([disassembler(), "-c", str(ptx["folder"] / f"{target}.cubin")], capture_output=True, text=True)
    assert said.returncode == 0, said.stderr
    used = {re.match(r"\w+", text)[0]: set(re.findall(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?(\w+)", text, re.M)) for text in said.stdout.split("\t.section\t.text.")[1:]}
    assert set(used) == set(assembled[target])
    for name, instructions in used.items():
        assert instructions & TENSOR_MEMORY == (TENSOR_MEMORY if re.search("(panel|pair|larfb)_kernel", name) else set()), name
        assert len(instructions) > 20 and ("HMMA" in instructions) == ("geqr2_whole" in name) and "HGMMA" not in instructions, name


def test_cuda_source_includes_no_torch_header():
    headers = re.findall(r"#include [<\"]([^>\"]+)", submission.CUDA_SOURCE)
    assert headers and not [name for name in headers if re.match(r"torch|ATen|c10|pybind", name)]


# ---------------------------------------------------------------------------------------------------------------------
# ThunderKittens and the tools: found, or missed by name
# ---------------------------------------------------------------------------------------------------------------------


def make_kittens(folder: Path) -> Path:
    (folder / "include").mkdir(parents=True)
    (folder / "include" / "kittens.cuh").touch()
    return folder / "include"


@pytest.fixture
def nowhere(monkeypatch, tmp_path, fresh_choice):
    """A place with no ThunderKittens in any of the searched folders."""
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(submission, "__file__", str(tmp_path / "elsewhere" / "submission.py"))
    return tmp_path


def script(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text("#!/bin/sh\n" + text)
    path.chmod(0o755)
    return path


def test_thunderkittens_is_looked_for_in_order(nowhere, monkeypatch):
    cache = make_kittens(submission.thunderkittens_cache())
    assert submission.find_thunderkittens() == cache and submission.THUNDERKITTENS_COMMIT in str(cache)
    beside = make_kittens(nowhere / "elsewhere" / "ThunderKittens")
    assert submission.find_thunderkittens() == beside
    here = make_kittens(nowhere / "work" / "ThunderKittens")
    assert submission.find_thunderkittens() == here
    monkeypatch.setenv("THUNDERKITTENS_ROOT", str(make_kittens(nowhere / "named").parent))
    assert submission.find_thunderkittens() == nowhere / "named" / "include"
    monkeypatch.setenv("THUNDERKITTENS_ROOT", str(nowhere / "wrong"))
    with pytest.raises(BuildError, match="THUNDERKITTENS_ROOT=.*wrong has no include/kittens.cuh"):
        submission.find_thunderkittens()


def test_thunderkittens_is_cloned_once_at_its_commit(nowhere, monkeypatch):
    log = nowhere / "log"
    bin_ = nowhere / "bin"
    bin_.mkdir()
    script(bin_, "git", f'echo "$@" >> {log}\ncase "$*" in *checkout*) mkdir -p "$2/include"; touch "$2/include/kittens.cuh";; esac\n')
    monkeypatch.setenv("PATH", str(bin_), prepend=os.pathsep)
    for _ in range(2):
        assert submission.find_thunderkittens() == submission.thunderkittens_cache() / "include"
    calls = log.read_text().splitlines()
    assert len(calls) == 3 and f"--depth 1 {submission.THUNDERKITTENS_URL} {submission.THUNDERKITTENS_COMMIT}" in calls[1]
    assert [path.name for path in submission.thunderkittens_cache().parent.iterdir()] == [submission.THUNDERKITTENS_COMMIT], "no litter"


def test_no_network_and_no_git_are_said(nowhere, monkeypatch):
    bin_ = nowhere / "bin"
    bin_.mkdir()
    script(bin_, "git", 'echo "fatal: unable to access: Could not resolve host: github.com" >&2\nexit 128\n')
    monkeypatch.setenv("PATH", str(bin_), prepend=os.pathsep)
    with pytest.raises(BuildError, match=r"cloning https://github.com/HazyResearch/ThunderKittens failed \(fatal: .*resolve host.*THUNDERKITTENS_ROOT"):
        submission.find_thunderkittens()
    assert not any(submission.thunderkittens_cache().parent.iterdir()), "no litter"
    monkeypatch.setenv("PATH", str(nowhere))
    with pytest.raises(BuildError, match="git, needed to fetch it, is not on PATH: set THUNDERKITTENS_ROOT"):
        submission.find_thunderkittens()


@pytest.fixture
def toolchain(monkeypatch, tmp_path):
    """A CUDA_HOME, ninja and compiler that check_toolchain accepts; returns the folder of stubs, which is all of PATH."""
    from torch.utils import cpp_extension
    (tmp_path / "bin").mkdir()
    script(tmp_path / "bin", "nvcc", 'echo "Cuda compilation tools, release 13.0, V13.0.88"\n')
    script(tmp_path / "bin", "ninja", "echo 1.13\n")
    script(tmp_path / "bin", "c++", 'echo "#define __GNUC__ 12"\n')
    monkeypatch.setattr(cpp_extension, "CUDA_HOME", str(tmp_path))
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.delenv("CXX", raising=False)
    submission.check_toolchain()
    return tmp_path / "bin"


def test_each_missing_tool_is_named(toolchain, monkeypatch):
    from torch.utils import cpp_extension
    (toolchain / "c++").rename(toolchain / "hidden")
    with pytest.raises(BuildError, match=r"no C\+\+ compiler: c\+\+ is not on PATH"):
        submission.check_toolchain()
    (toolchain / "ninja").unlink()
    with pytest.raises(BuildError, match="ninja is not on PATH: pip install ninja"):
        submission.check_toolchain()
    (toolchain / "nvcc").unlink()
    with pytest.raises(BuildError, match="nvcc not found.*CUDA_HOME"):
        submission.check_toolchain()
    monkeypatch.setattr(cpp_extension, "CUDA_HOME", None)
    with pytest.raises(BuildError, match="CUDA_HOME is None"):
        submission.check_toolchain()


def test_old_compiler_and_other_cuda_are_said(toolchain, monkeypatch):
    script(toolchain, "g++-10", 'echo "#define __GNUC__ 10"\n')
    monkeypatch.setenv("CXX", "g++-10")
    with pytest.raises(BuildError, match=r"g\+\+-10 is g\+\+ 10: C\+\+20 needs g\+\+ 11"):
        submission.check_toolchain()
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    with pytest.raises(BuildError, match=r"is CUDA 13\.0, but torch .* was built with CUDA 12\.8"):
        submission.check_toolchain()


def test_compile_error_is_quoted(toolchain, monkeypatch):
    from torch.utils import cpp_extension

    def broken(*args, **kwargs):
        raise RuntimeError("Error building extension\n[1/3] nvcc\nqr.cu(12): error: identifier \"x\" is undefined\nninja: build stopped")
    monkeypatch.setattr(cpp_extension, "load_inline", broken)
    with pytest.raises(BuildError, match=r'compiling the mma extension for compute capability 8\.0 failed: qr\.cu\(12\): error: identifier "x"'):
        submission.build("mma", (8, 0))


def test_build_name_follows_sources_flags_and_versions(toolchain, monkeypatch):
    from torch.utils import cpp_extension
    names = []
    monkeypatch.setattr(cpp_extension, "load_inline", lambda name, *args, **kwargs: names.append(name))
    submission.build("mma", (8, 0))
    submission.build("mma", (8, 0))
    assert names[0] == names[1] and names[0].startswith("qr_mma_")
    submission.build("mma", (8, 6))
    monkeypatch.setattr(submission, "CUDA_SOURCE", submission.CUDA_SOURCE + "\n")
    submission.build("mma", (8, 0))
    monkeypatch.setattr(torch, "__version__", "0.0")
    submission.build("mma", (8, 0))
    assert len(set(names)) == 4


# ---------------------------------------------------------------------------------------------------------------------
# Choice of the backend, on a pretended device
# ---------------------------------------------------------------------------------------------------------------------


class Properties:
    multi_processor_count, shared_memory_per_block_optin = 132, 232448


class Extension:
    def __init__(self, name):
        self.name = name

    def resident_clusters(self, ranks):
        return {2: 66, 4: 30, 8: 14, 16: 7}[ranks]


class NoDevice:
    def __init__(self, *args):
        pass

    def __enter__(self):
        return self

    def __exit__(self, *args):
        return False


@pytest.fixture
def hopper(monkeypatch, fresh_choice):
    """Compute capability 9.0 where everything builds and is right; `broken` names backends that do not build or not prove."""
    broken = {}

    def build(name, capability):
        if broken.get(name) == "build":
            raise BuildError(f"no compiler for {name}")
        return Extension(name)

    def prove(extension, name, info, index):
        if broken.get(name) == "wrong":
            raise BuildError(f"the {name} backend computed a wrong factorization")
        if broken.get(name) == "crash":
            raise RuntimeError("larfb_kernel: an illegal instruction")
        if broken.get(name) == "disk":
            raise PermissionError("Permission denied: '/nowhere'")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: Properties)
    monkeypatch.setattr(torch.cuda, "device", NoDevice)
    monkeypatch.setattr(submission, "build", build)
    monkeypatch.setattr(submission, "prove", prove)
    return broken


def test_best_backend_is_chosen_without_a_word(hopper):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        choice = submission.choose_backend(0)
    assert choice.name == choice.extension.name == "wgmma" and choice.info.max_cluster == 16 and choice.info == H200 and choice.reason == ""


@pytest.mark.parametrize("fault, words", [("build", "no compiler for wgmma"), ("wrong", "wrong factorization"), ("crash", "illegal instruction"), ("disk", "Permission denied")])
def test_a_failing_backend_is_said_once_and_the_next_serves(hopper, fault, words):
    hopper["wgmma"] = fault
    with pytest.warns(UserWarning, match=f"custom_kernel cannot use wgmma: .*{words}") as caught:
        choice = submission.choose_backend(0)
        assert submission.choose_backend(0) is choice
    assert len(caught) == 1 and choice.name == "mma" and words in choice.reason


def test_geqrf_serves_when_nothing_works(hopper):
    hopper.update(wgmma="build", mma="wrong")
    with pytest.warns(UserWarning) as caught:
        choice = submission.choose_backend(0)
    assert [str(w.message).split(":")[0] for w in caught] == ["custom_kernel cannot use wgmma", "custom_kernel cannot use mma"]
    assert choice.name == "geqrf" and choice.extension is None
    route, steps, extension = submission._route(0, 2, 100)
    assert (route.backend, steps, extension) == ("geqrf", b"", None) and "no compiler for wgmma" in route.reason


def test_forced_backend(hopper, monkeypatch):
    monkeypatch.setenv("QR_BACKEND", "mma")
    assert submission.choose_backend(0).name == "mma"
    hopper["mma"] = "wrong"
    submission.choose_backend.cache_clear()
    with pytest.raises(BuildError, match="wrong factorization"):
        submission.choose_backend(0)
    monkeypatch.setenv("QR_BACKEND", "tcgen05")
    with pytest.raises(BuildError, match=r"QR_BACKEND=tcgen05: compute capability 9\.0 has wgmma, mma"):
        submission.choose_backend(0)
    monkeypatch.setenv("QR_BACKEND", "cublas")
    with pytest.raises(ValueError, match="QR_BACKEND: expected one of tcgen05, wgmma, mma, geqrf, got 'cublas'"):
        submission.choose_backend(0)
    monkeypatch.setenv("QR_BACKEND", "geqrf")
    assert submission.choose_backend(0).name == "geqrf"


def test_forced_fallback_builds_nothing(hopper, monkeypatch):
    monkeypatch.setattr(submission, "build", None)
    monkeypatch.setenv("QR_FORCE_FALLBACK", "1")
    assert submission.choose_backend(0).reason == "QR_FORCE_FALLBACK=1"


def test_unsupported_device_is_said(hopper, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (7, 5))
    with pytest.warns(UserWarning, match=r"custom_kernel uses torch.geqrf: compute capability 7\.5 is below 8\.0"):
        assert submission.choose_backend(0).name == "geqrf"


class NamedExtension(Extension):
    @property
    def __name__(self):
        return f"qr_{self.name}_0123"


@pytest.fixture
def blackwell(hopper, monkeypatch, tmp_path):
    """A pretended B200 whose proof runs in a child process: a stand-in for submission.py that does what the test says."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (10, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "B200")
    monkeypatch.setattr(torch._C, "_cuda_getDriverVersion", lambda: 13000, raising=False)
    monkeypatch.setattr(submission, "build", lambda name, capability: NamedExtension(name))
    monkeypatch.setattr(submission, "__file__", str(tmp_path / "child.py"))

    def child(text):
        submission.choose_backend.cache_clear()
        (tmp_path / "child.py").write_text("import sys, time\nopen(__file__ + '.log', 'a').write(' '.join(sys.argv[1:]) + '\\n')\n" + text)
        return lambda: (tmp_path / "child.py.log").read_text().splitlines()
    return child


def test_a_proof_apart_that_passes_is_kept(blackwell):
    runs = blackwell("sys.exit(0)")
    for _ in range(3):
        submission.choose_backend.cache_clear()
        assert submission.choose_backend(0).name == "tcgen05"
    assert runs() == ["prove tcgen05 0"]


@pytest.mark.parametrize("text, words", [("print('the tcgen05 backend computed a wrong factorization', file=sys.stderr); sys.exit(3)", "wrong factorization"),
                                         ("time.sleep(60)", "did not finish its proof in 1 s")])
def test_a_proof_apart_that_fails_or_hangs_is_kept_and_said(blackwell, monkeypatch, text, words):
    monkeypatch.setattr(submission, "PROOF_SECONDS", 1)
    runs = blackwell(text)
    for _ in range(2):
        submission.choose_backend.cache_clear()
        with pytest.warns(UserWarning, match=f"custom_kernel cannot use tcgen05: .*{words}"):
            assert submission.choose_backend(0).name == "mma"
    assert len(runs()) == 1


def test_a_proof_apart_that_could_not_run_is_tried_again(blackwell):
    runs = blackwell("raise MemoryError('no room')")
    with pytest.warns(UserWarning, match="exit status 1: MemoryError: no room"):
        assert submission.choose_backend(0).name == "mma"
    runs = blackwell("sys.exit(0)")
    assert submission.choose_backend(0).name == "tcgen05" and len(runs()) == 2


@pytest.mark.parametrize("text, words", [
    ("sys.stderr.write('RuntimeError: CUDA error: invalid device ordinal\\nCompile with TORCH_USE_CUDA_DSA\\n\\n'); sys.exit(1)", "exit status 1: RuntimeError: CUDA error: invalid"),
    ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "exit status -11: it said nothing")])
def test_a_proof_apart_that_ends_early_is_said(blackwell, text, words):
    blackwell(text)
    with pytest.warns(UserWarning, match=f"custom_kernel cannot use tcgen05: .*{words}"):
        assert submission.choose_backend(0).name == "mma"


def test_a_child_that_cannot_be_ended_does_not_hold_the_caller(blackwell, monkeypatch):
    """As where the driver cannot end a kernel that hangs: the wait for the child has its own limit."""
    waits, real_wait = [], subprocess.Popen.wait
    monkeypatch.setattr(submission, "PROOF_SECONDS", 1)
    monkeypatch.setattr(subprocess.Popen, "kill", lambda child: waits.append(child))
    monkeypatch.setattr(subprocess.Popen, "wait", lambda child, timeout=None: real_wait(child, timeout and min(timeout, 0.1)))
    blackwell("time.sleep(60)")
    with pytest.warns(UserWarning, match="did not finish its proof"):
        assert submission.choose_backend(0).name == "mma"
    monkeypatch.undo()
    assert len(waits) == 1 and waits[0].poll() is None
    waits[0].kill()
    waits[0].communicate()


def test_without_a_place_for_the_verdict_each_process_proves(blackwell, monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    runs = blackwell("sys.exit(0)")
    for _ in range(2):
        submission.choose_backend.cache_clear()
        assert submission.choose_backend(0).name == "tcgen05"
    assert len(runs()) == 2


def test_another_driver_device_or_source_is_proved_anew(blackwell, monkeypatch):
    files = {submission.verdict_file(NamedExtension("tcgen05"), 0)}
    files.add(submission.verdict_file(NamedExtension("other"), 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "GB300")
    files.add(submission.verdict_file(NamedExtension("tcgen05"), 0))
    monkeypatch.setattr(submission.Path, "read_text", lambda self: "another driver")
    files.add(submission.verdict_file(NamedExtension("tcgen05"), 0))
    assert len(files) == 4


@pytest.mark.parametrize("error, status, words", [
    (BuildError("the mma backend computed a wrong factorization"), submission.WRONG, "wrong factorization"),
    (RuntimeError("CUDA error: an illegal memory access was encountered\nCompile with ..."), submission.WRONG, "the mma backend broke: CUDA error: an illegal memory access was encountered\n"),
    (None, 0, "")])
def test_the_child_says_what_was_wrong(hopper, monkeypatch, capsys, error, status, words):
    def prove(*args):
        if error:
            raise error
    monkeypatch.setattr(submission, "prove", prove)
    assert submission._child(["prove", "mma", "0"]) == status
    said = capsys.readouterr().err
    assert words in said and bool(words) == bool(said)


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory"), RuntimeError("CUDA error: all CUDA-capable devices are busy or unavailable")])
def test_the_child_has_no_verdict_where_the_device_had_no_room(hopper, monkeypatch, error):
    def prove(*args):
        raise error
    monkeypatch.setattr(submission, "prove", prove)
    with pytest.raises(RuntimeError):
        submission._child(["prove", "mma", "0"])


@pytest.mark.parametrize("info", [B200, B200._replace(multiprocessors=160, clusters=(80, 40, 18, 9))])
def test_proofs_apart_meet_every_kernel_that_makes_products(info):
    """One and two panels at once, n of each parity and alignment, one block and more to a multiprocessor or to a matrix, tiles of V that stay or go."""
    updates, panels = set(), set()
    for batch, n in submission.proofs("tcgen05", info):
        for step in plan(batch, n, info, "tcgen05").steps[:-1]:
            panels.add((n % 4 == 0, batch * step.panel_ranks > info.multiprocessors))
            if step.panels:
                tiles = -(-(n - step.column) // PANEL) + step.panels - 1
                updates |= {(step.panels, n % 2), ("refills", -(-tiles // step.larfb_ranks) > step.slots, step.larfb_ranks > 1)}
    assert updates == {(1, 0), (1, 1), (2, 0), (2, 1), *(("refills", some, more) for some in (False, True) for more in (False, True))}
    assert panels >= {(True, False), (True, True), (False, False)}
    assert submission.proofs("wgmma", info) == [(2, 260)], "a fault that is no hang costs less to find"


def test_the_child_refuses_other_arguments():
    for arguments in ([], ["prove"], ["prove", "cublas", "0"], ["prove", "mma", "-1"], ["measure", "mma", "0"]):
        assert submission._child(arguments) == 2


@pytest.mark.parametrize("capability, want", [((7, 5), []), ((8, 0), ["mma"]), ((8, 9), ["mma"]), ((9, 0), ["wgmma", "mma"]), ((10, 0), ["tcgen05", "mma"]),
                                              ((10, 3), ["tcgen05", "mma"]), ((12, 0), ["mma"])])
def test_candidates(capability, want):
    assert submission.candidates(capability) == want


def test_import_needs_no_compiler_and_no_device(tmp_path):
    """A fresh process with an empty PATH imports the module and factors a CPU tensor."""
    code = "import torch, submission; H, tau = submission.custom_kernel(torch.eye(3)[None]); print(tuple(tau.shape))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env={"PATH": str(tmp_path), "CUDA_VISIBLE_DEVICES": ""}, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.strip() == "(1, 3)", done.stderr
