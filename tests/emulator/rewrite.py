"""Blackwell's PTX for Hopper: every tcgen05 instruction becomes a call of a device function of tcgen05.cu.

    rewrite(ptx)     the text of an sm_100a module -> that of an sm_90a module
    Sources(...)     CUDA source, compiled as far as PTX; its library() has the source's host code and the rewritten kernels

Kernels without tcgen05 instructions are only retargeted. A tcgen05 or other sm_100-only instruction that is not modelled is a
NotModelled error, here or from ptxas.
"""
import functools
import re
import subprocess
from pathlib import Path

HERE = Path(__file__).resolve().parent
NAN = "0f7FC0DEAD"


class NotModelled(Exception):
    """An instruction that the emulator does not know; the message is the instruction."""


def call(name: str, arguments: list[tuple[str, str]], result: str | None = None, guard: str = "") -> str:
    """PTX that calls a device function. arguments: (type, register); result: a 32-bit register."""
    lines = ["{"]
    if result:
        lines.append(".param .b32 returned;")
    for i, (kind, register) in enumerate(arguments):
        lines += [f".param .{kind} a{i};", f"st.param.{kind} [a{i}], {register};"]
    returned = "(returned), " if result else ""
    passed = f", ({', '.join(f'a{i}' for i in range(len(arguments)))})" if arguments else ""
    lines.append(f"{guard} call {returned}{name}{passed};")
    if result:
        lines.append(f"ld.param.b32 {result}, [returned];")
    return "\n".join(lines + ["}"])


def low_word(register: str, then: str) -> str:
    """`then`, in which `low` is the low 32 bits of a 64-bit register: a shared-window address, however it was written."""
    return f"{{ .reg .b32 low; cvt.u32.u64 low, {register};\n{then}\n}}"


def address_call(name: str, operand: str, size: int, guard: str) -> str:
    """A call of an emulate_*store function with the address of a PTX memory operand, `base` or `base+offset`."""
    base, _, offset = operand.partition("+")
    offset = offset or "0"
    if base.startswith("%rd"):
        if name == "emulate_store":
            return low_word(base, f"add.u32 low, low, {offset};\n" + call(name, [("b32", "low"), ("b32", str(size))], guard=guard))
        return f"{{ .reg .b64 at; add.s64 at, {base}, {offset};\n" + call(name, [("b64", "at"), ("b32", str(size))], guard=guard) + "\n}"
    move = f"add.u32 at, {base}, {offset};" if base.startswith("%") else f"mov.u32 at, {base}; add.u32 at, at, {offset};"
    return f"{{ .reg .b32 at; {move}\n" + call("emulate_store", [("b32", "at"), ("b32", str(size))], guard=guard) + "\n}"


STORE = re.compile(r"^(?P<guard>@!?%p\d+\s+)?st\.(?P<space>shared\.)?(?:v(?P<count>\d)\.)?[buf](?P<bits>\d+)\s+\[(?P<at>[^\]]+)\]")
COPY = re.compile(r"^(?P<guard>@!?%p\d+\s+)?cp\.async\.c[ag]\.shared\.global\s+\[(?P<at>[^\]]+)\]\s*,\s*\[[^\]]+\]\s*,\s*(?P<size>\d+)")
BULK = re.compile(r"^(?P<guard>@!?%p\d+\s+)?cp\.async\.bulk\.shared::cluster\.global\.mbarrier::complete_tx::bytes\s+\[(?P<at>%\w+)\]\s*,\s*\[[^\]]+\]\s*,\s*(?P<size>%?\w+)")
TENSOR = re.compile(r"^(?P<guard>@!?%p\d+\s+)?cp\.async\.bulk\.tensor\.3d\.shared::cluster\.global\.mbarrier::complete_tx::bytes\s+\[(?P<at>%\w+)\]\s*,\s*\[[^\]]+\]\s*,\s*\[%\w+\]$")
PUSH = re.compile(r"^(?:@!?%p\d+\s+)?st\.async\.weak\.shared::cluster\.mbarrier::complete_tx::bytes\.v4\.f32\s")
BOX_BYTES = 4096             # of the tensor map's box: the instruction does not say
WAIT = re.compile(r"mbarrier\.(?:try|test)_wait\.parity[\w.:]*\s+[%\w]+\s*,\s*\[(?P<at>%\w+(?:\+\d+)?)\]\s*,\s*(?P<parity>%?\w+)")
# What else may write shared memory, wait on an mbarrier, or fence the asynchronous proxy.
UNKNOWN = re.compile(r"^(?:@!?%?\w+\s+)?(?:st\.(?!global|local|param)|stmatrix|(?:red|cp)\.(?:reduce\.)?async\.bulk|red\.async|cp\.async\.c[ag]|mbarrier\.\w+_wait|fence\.proxy)")
MMA = re.compile(r"tcgen05\.mma\.cta_group::1\.kind::f16\s+\[(%\w+)\],\s*(%rd\w+),\s*(%rd\w+),\s*(%\w+),\s*(\w+)$")
LOAD = re.compile(r"tcgen05\.ld\.sync\.aligned\.16x256b\.x(\d+)\.b32\s+\{([^}]*)\},\s*\[(%\w+)\]$")


class Kernel:
    """Rewrites the statements of one kernel, in order."""

    def __init__(self):
        self.loads = []          # (registers, saved address) of loads that no wait has delivered yet
        self.saved = 0

    def statement(self, text: str) -> str:
        """One PTX statement, without its semicolon -> its replacement, with one."""
        plain = text.strip()
        if match := WAIT.match(plain):
            at, _, offset = match["at"].partition("+")
            before = call("emulate_wait", [("b32", "at"), ("b32", match["parity"])])
            return f"{{ .reg .b32 at; add.u32 at, {at}, {offset or 0};\n{before}\n}}\n{text};"
        if match := STORE.match(plain):
            size = int(match["count"] or 1) * int(match["bits"]) // 8
            name = "emulate_store" if match["space"] else "emulate_generic_store"
            return f"{text};\n" + address_call(name, match["at"], size, match["guard"] or "")
        if match := COPY.match(plain):
            return f"{text};\n" + address_call("emulate_store", match["at"], int(match["size"]), match["guard"] or "")
        if match := BULK.match(plain):
            return call("emulate_bulk_copy", [("b32", match["at"]), ("b32", match["size"])], guard=match["guard"] or "") + f"\n{text};"
        if match := TENSOR.match(plain):
            return call("emulate_bulk_copy", [("b32", match["at"]), ("b32", str(BOX_BYTES))], guard=match["guard"] or "") + f"\n{text};"
        if PUSH.match(plain):                                # numbers that other threads load: no operand of a product is written so
            return text + ";"
        if plain == "fence.proxy.async.global":              # what copies bring in is written at once here
            return text + ";"
        if plain == "fence.proxy.async.shared::cta":
            return f"{text};\n" + call("emulate_proxy_fence", [])
        if UNKNOWN.match(plain):
            raise NotModelled(plain)
        if "tcgen05." not in plain:
            return text + ";"
        return self.tcgen05(plain)

    def tcgen05(self, plain: str) -> str:
        if match := re.match(r"tcgen05\.alloc\.cta_group::1\.sync\.aligned\.shared::cta\.b32\s+\[(%rd\w+)\],\s*(\w+)$", plain):
            return low_word(match[1], call("emulate_alloc", [("b32", "low"), ("b32", match[2])]))
        if plain == "tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned":
            return ""                # a block allocates once, here: a second time stops it
        if match := re.match(r"tcgen05\.dealloc\.cta_group::1\.sync\.aligned\.b32\s+(%\w+),\s*(\w+)$", plain):
            return call("emulate_dealloc", [("b32", match[1]), ("b32", match[2])])
        if plain == "tcgen05.fence::before_thread_sync":
            return "fence.acq_rel.cta;"
        if plain == "tcgen05.fence::after_thread_sync":
            return call("emulate_fence_after", [])
        if match := MMA.match(plain):
            d, a, b, idesc, accumulate = match.groups()
            arguments = [("b32", d), ("b64", a), ("b64", b), ("b32", idesc), ("b32", "flag")]
            return f"{{ .reg .b32 flag; selp.b32 flag, 1, 0, {accumulate};\n" + call("emulate_mma", arguments) + "\n}"
        if match := re.match(r"tcgen05\.commit\.cta_group::1\.mbarrier::arrive::one\.b64\s+\[(%rd\w+)\]$", plain):
            return low_word(match[1], call("emulate_commit", [("b32", "low")]))
        if match := LOAD.match(plain):
            registers = [x.strip() for x in match[2].split(",")]
            if len(registers) != 4 * int(match[1]):
                raise NotModelled(plain)
            saved = f"%emulated{self.saved}"
            self.saved += 1
            self.loads.append((registers, saved))
            return f"mov.b32 {saved}, {match[3]};\n" + "\n".join(f"mov.b32 {register}, {NAN};" for register in registers)
        if plain == "tcgen05.wait::ld.sync.aligned":
            lines = [call("emulate_ld", [("b32", saved), ("b32", str(i))], register)
                     for registers, saved in self.loads for i, register in enumerate(registers)]
            self.loads.clear()
            return "\n".join(lines + ["bar.warp.sync 0xffffffff;"])
        raise NotModelled(plain)


def rewrite_kernel(text: str) -> str:
    """The text of one entry, from `.visible .entry` to its closing brace."""
    kernel = Kernel()
    head, brace, body = text.partition("\n{")
    pieces = []
    for line in body.split("\n"):
        if line.lstrip().startswith("//") or ";" not in line:
            pieces.append(line)
            continue
        *statements, rest = line.split(";")
        done = []
        for statement in statements:
            opening = re.match(r"\s*\{?\s*", statement)[0]   # a scope may open on the statement's line
            done.append(opening + kernel.statement(statement[len(opening):]))
        pieces.append(" ".join(done) + rest)
    registers = f"\n.reg .b32 %emulated<{kernel.saved + 1}>;"
    return head + brace + registers + "\n".join(pieces)


def rewrite(ptx: str, emulator: str) -> str:
    """The text of an sm_100a module, with the emulator's functions (sm_90a PTX) before it -> an sm_90a module."""
    if ".target sm_100a" not in ptx:
        raise NotModelled("a module that is not for sm_100a")
    header = re.compile(r"^\.version.*\n|^\.target.*\n|^\.address_size.*\n", re.M)
    start = ptx.index(".address_size")
    end = ptx.index("\n", start) + 1
    entries = re.split(r"(?=^\.visible \.entry|^\t?\.entry)", ptx[end:], flags=re.M)
    body = "".join(rewrite_kernel(entry) if "tcgen05." in entry else entry for entry in entries)
    return ptx[:end].replace("sm_100a", "sm_90a") + header.sub("", emulator) + body


def emulator_ptx(folder: Path) -> str:
    out = folder / "emulator.ptx"
    run(["nvcc", "-ptx", "-rdc=true", "-std=c++17", "-arch=compute_90a", str(HERE / "tcgen05.cu"), "-o", str(out)])
    return out.read_text()


def run(command, **options):
    done = subprocess.run(command, capture_output=True, text=True, **options)
    if done.returncode:
        raise RuntimeError(f"{command if isinstance(command, str) else ' '.join(command)}\n{done.stdout}{done.stderr}")
    return done


class Sources:
    """CUDA source compiled by nvcc for sm_100a as far as PTX, in a folder of its own. flags: nvcc's, without the architecture."""

    def __init__(self, source: str, flags: list[str], folder: Path):
        self.folder = folder
        (folder / "qr.cu").write_text(source)
        (folder / "keep").mkdir(exist_ok=True)
        said = run(["nvcc", "--dryrun", "--keep", "--keep-dir", str(folder / "keep"), "-Xcompiler", "-fPIC", "-gencode", "arch=compute_100a,code=sm_100a",
                    *flags, "-c", "qr.cu", "-o", "qr.o"], cwd=folder).stderr
        steps = [line.removeprefix("#$ ") for line in said.splitlines() if line.startswith("#$ ")]
        self.settings = [f"export {step}" for step in steps if re.match(r"(CICC_PATH|PATH)=", step)]
        commands = [step for step in steps if not re.match(r"\w+=", step)]
        cicc = next(i for i, step in enumerate(commands) if "cicc" in step)
        self.assembling = [step.replace("-arch=sm_100a", "-arch=sm_90a").replace("sm=100a", "sm=90a") for step in commands[cicc + 1:]]
        self.script(commands[:cicc + 1])
        self.ptx = (folder / "keep" / "qr.ptx").read_text()
        self.emulator = emulator_ptx(folder)

    def script(self, lines: list[str]) -> None:
        run("\n".join(["set -e", *self.settings, *lines]), cwd=self.folder, shell=True, executable="/bin/bash")

    @functools.cache
    def built(self) -> Path:
        """The library without a change."""
        return self.library()

    def library(self, name: str = "libqr.so", mutate=lambda ptx: ptx) -> Path:
        """A shared library: the source's host code, its kernels `mutate`d as PTX, rewritten and assembled for sm_90a."""
        (self.folder / "keep" / "qr.ptx").write_text(rewrite(mutate(self.ptx), self.emulator))
        self.script(self.assembling)
        run(["nvcc", "-shared", str(self.folder / "qr.o"), "-o", str(self.folder / name)])
        return self.folder / name
