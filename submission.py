"""Batched Householder QR for GPUs: `custom_kernel(A)` returns `(H, tau)` as `torch.geqrf` does.

A is batch x n x n, float32, on a CUDA device. H holds R in its upper triangle and the reflectors' tails below; Q = H_1 ... H_n,
H_k = I - tau_k v_k v_k^T. A is only read. Kernels go to the default queue of A's device, and only there; the call returns
without waiting for them. No derivative, as for torch.geqrf.

How it works: columns are factored in panels of 64 (geqr2). A panel is taken from its Gram matrix, in one meeting of its rows,
unless its columns are nearly dependent: then column by column, in float32. The panel's reflectors V come with T, which gathers
them into I - V T V^T (larft). Panels go in pairs: the first is applied to the second, then both at once to the columns right of them
(larfb), on tensor cores, every float32 operand split into two bf16 parts, three products of parts, float32 sums. A matrix of up to 192
columns, or the last of a larger one, is one launch: panels of 16 columns, a warp each, on the same principles.

File map
  Route:        plan, plan_for, custom_kernel
  CUDA, shared: split_bf16, take_bf16, warp_sum
  geqr2:        larfg, geqr2_whole_kernel, geqr2_kernel, geqr2_cluster_kernel, geqr2_tall_kernel, gram_panel (gram_factor), pair_kernel
  larft:        larft (gram_panel makes its own T)
  larfb:        MmaSync, Wgmma, Tcgen05 (products of tiles), update_panel (of a pair's second panel), larfb_kernel
  Host driver:  qr_geqrf
  Build:        find_thunderkittens, check_toolchain, build
  Choice:       candidates, prove, prove_apart, choose_backend

Environment
  QR_BACKEND            tcgen05, wgmma, mma or geqrf: use this one or fail
  QR_FORCE_FALLBACK=1   torch.geqrf for everything
  THUNDERKITTENS_ROOT   folder that holds ThunderKittens' include/kittens.cuh
"""
import array
import contextlib
import functools
import hashlib
import os
import re
import shutil
import subprocess
import sys
import warnings
from pathlib import Path
from typing import NamedTuple

import torch
from task import input_t, output_t

# =====================================================================================================================
# Route: from batch, n and the device to kernels
# =====================================================================================================================
PANEL = 64                   # columns of a panel
WHOLE_LIMIT = 192            # largest matrix, or last block of a larger one, that one block keeps in registers
MANY_LIMIT = 96              # the same for the last blocks of more matrices than multiprocessors: what counts then is work, not one matrix's chain
BLOCK_ROWS = 512             # rows of a panel that one block keeps in registers
PAIR = 16 * 1024             # bytes of a 64 x 64 tile in two bf16 parts
LARFB_GROUPS, LARFB_SLOTS = 2, 8    # at most: warpgroups of a block of the larfb kernel, tiles of V in its shared memory
# The larfb kernel's cost, in units of about a cycle: a block's start; a tile of 64 rows in both passes over C, by one panel; a round's products with T;
# a cluster's meeting. With them the route was within 1 % of the best of nine fixed ones on each of five shapes (H200, 2026-12-01, kernels of entry 18 in
# benchmarks/LOG.md).
LARFB_START, LARFB_TILE, LARFB_ROUND, LARFB_MEET = 5000, 2000, 2000, 6000
# A panel's: the chain of its columns, and 128 rows for one block; a launch.
PANEL_START, PANEL_SLAB, LAUNCH = 20000, 7000, 6000
BLOCKED_SHARED = 161 * 1024  # bytes of shared memory a block needs beyond 128 rows
WHOLE, SINGLE, CLUSTER, TALL = range(4)   # kinds of Step, as in the CUDA source's StepKind
CLUSTER_SIZES = 2, 4, 8, 16
MAX_BLOCKS = 2**31 - 1       # of one launch


class DeviceInfo(NamedTuple):
    """What a route depends on: compute capability, multiprocessors, bytes of shared memory one block can have, and how many
    clusters of 2, 4, 8 and 16 blocks are resident at once, each block on a multiprocessor of its own (0: no such clusters)."""
    capability: tuple[int, int]
    multiprocessors: int
    shared_bytes: int
    clusters: tuple[int, int, int, int]

    @property
    def max_cluster(self) -> int:
        """Blocks of the largest cluster, 1 without clusters."""
        return max([1, *(ranks for ranks, count in zip(CLUSTER_SIZES, self.clusters) if count)])

    def resident(self, ranks: int) -> int:
        """How many clusters of `ranks` blocks run at once; ranks = 1: blocks."""
        return self.multiprocessors if ranks == 1 else self.clusters[CLUSTER_SIZES.index(ranks)]


class Step(NamedTuple):
    """One panel and what follows it, or the last square block whole.

    Column by column a panel's rows are dealt to `ranks` blocks, at most 32 rows_per_lane each (0: any number, kept in memory; whole
    matrices: 4 for every 16 rows); with `gram` the panel kernel tries first, on `panel_ranks` blocks a matrix, and this is for the matrices
    that it declined; gram = 2: this and the next panel in one launch. Then `panels` panels (this one, or this and the one before) update what is right of them; 0: the next panel updates
    itself. Each matrix's rows are dealt to `larfb_ranks` blocks, its columns to `chunks` clusters, with `slots` tiles
    of V in a block's shared memory and `groups` warpgroups in a block. With `ahead_ranks` the columns of the next panel or pair are updated first,
    with these four figures, and the rest while that is factored."""
    kind: int
    column: int
    rows_per_lane: int
    ranks: int
    gram: int = 0
    panel_ranks: int = 0
    panels: int = 0
    larfb_ranks: int = 0
    chunks: int = 0
    slots: int = 0
    groups: int = 0
    ahead_ranks: int = 0
    ahead_chunks: int = 0
    ahead_slots: int = 0
    ahead_groups: int = 0


class Plan(NamedTuple):
    """The route of one shape. Without steps it is torch.geqrf's, and `reason` says why."""
    backend: str
    steps: tuple[Step, ...]
    reason: str = ""


class Larfb(NamedTuple):
    """The shape of an update's launch (Step's larfb_ranks, chunks, slots, groups)."""
    ranks: int
    chunks: int
    slots: int
    groups: int


def larfb_shape(batch: int, rows: int, panels: int, units: int, multiprocessors: int, info: DeviceInfo, backend: str) -> tuple[int, Larfb]:
    """The cheapest update of `units` times 64 columns by one or two panels, the first of `rows` rows, on so many of the multiprocessors:
    (cycles, shape), by a count of cycles.

    A block costs its start, and for each round of its warpgroups the tiles of 64 rows, twice, and the products with T."""
    tiles = -(-rows // PANEL)
    best = None
    for groups in range(1, min(LARFB_GROUPS, units) + 1):
        fixed = 2 * panels - 1 + groups * (3 if backend == "tcgen05" else 2)
        ranks = 1
        while ranks <= min(info.max_cluster, 8, tiles):
            resident = max(1, info.resident(ranks) * multiprocessors // info.multiprocessors)
            own_tiles = -(-tiles // ranks)
            slots = min(LARFB_SLOTS, own_tiles, ((info.shared_bytes - 1024) // PAIR - fixed) // panels)
            for chunks in dict.fromkeys(-(-units // per_chunk) for per_chunk in range(groups, min(units, 64) + 1)):
                if units // chunks < groups:                                  # every warpgroup has a unit in the first round
                    continue
                waves = -(-batch * chunks // resident)
                rounds = -(-units // chunks // groups)
                cycles = waves * (LARFB_START + rounds * (panels * (own_tiles * LARFB_TILE + LARFB_ROUND) + (ranks > 1) * LARFB_MEET))
                if slots >= min(2, own_tiles) and (best is None or cycles < best[0]):
                    best = cycles, Larfb(ranks, chunks, slots, groups)
            ranks *= 2
    return best


def panel_ranks(batch: int, rows: int, info: DeviceInfo) -> int:
    """Blocks that share a matrix's panel of so many rows: as many as have rows, without leaving one without a multiprocessor."""
    ranks = 1
    while 2 * ranks <= info.max_cluster and batch <= info.resident(2 * ranks) and rows > 64 * (2 * ranks - 1):
        ranks *= 2
    return ranks


def update(batch: int, rows: int, panels: int, coming: int, info: DeviceInfo, backend: str) -> tuple[Larfb, Larfb | None, int]:
    """(shape, shape of what goes ahead, ranks of the panels that come next) of the update by one or two panels, the first of `rows` rows,
    where `coming` panels follow as a pair or alone.

    Ahead are the columns of the panels to come, where factoring these beside the rest of the update costs less than after all of it."""
    units, below = -(-rows // PANEL) - panels, rows - panels * PANEL
    cycles, shape = larfb_shape(batch, rows, panels, units, info.multiprocessors, info, backend)
    if not coming:
        return shape, None, 0
    most = ranks = panel_ranks(batch, below, info)

    def factoring() -> int:
        return coming * (PANEL_START + -(-below // (2 * PANEL * ranks)) * PANEL_SLAB)
    best = cycles + factoring(), (shape, None, most)
    while info.capability >= (9, 0) and ranks:
        free = info.multiprocessors - batch * ranks
        if free > 0:
            first, ahead = larfb_shape(batch, rows, panels, coming, info.multiprocessors, info, backend)
            cycles, shape = larfb_shape(batch, rows, panels, units - coming, free, info, backend)
            best = min(best, (first + LAUNCH + max(factoring(), cycles), (shape, ahead, ranks)), key=lambda choice: choice[0])
        ranks //= 2
    return best[1]


def plan(batch: int, n: int, info: DeviceInfo, backend: str) -> Plan:
    """The route of a batch of n x n matrices on a device. Pure.

    Column by column, a panel of up to 512 rows is one block's. A taller one is spread over a cluster: as few blocks as hold it, then twice as
    many while that leaves no block without a multiprocessor; what no cluster holds stays in memory. Panels go in pairs: the second
    is updated by the first alone, the rest by both at once. A matrix of at most 192 columns, or the last at most 192 of a larger one (96 of many), is one launch."""
    if backend == "geqrf":
        return Plan("geqrf", (), "torch.geqrf was asked for")
    if n > 128 and info.shared_bytes < BLOCKED_SHARED:
        return Plan("geqrf", (), f"n = {n} needs {BLOCKED_SHARED} bytes of shared memory a block, the device has {info.shared_bytes}")

    steps, column, panels = [], 0, 0
    last = MANY_LIMIT if batch > info.multiprocessors and n > WHOLE_LIMIT else WHOLE_LIMIT
    together, beside = panel_ranks(batch, n, info), False                    # blocks of a matrix that factor the panels to come; beside an update
    while n - column > last:
        rows, ranks = n - column, 1
        panels += 1                                                          # not yet applied to what is right of them
        coming = min(2, -(-max(0, rows - PANEL - last) // PANEL))
        follow = (1 + (beside and panels == 1 and coming > 0), together, 0)
        if panels == 2 or not coming:
            shape, ahead, after = update(batch, rows + (panels - 1) * PANEL, panels, coming, info, backend)
            follow = (1, together, panels, *shape, *(ahead or ()))
            panels, together, beside = 0, after, ahead is not None
        while rows > BLOCK_ROWS * ranks and ranks < info.max_cluster:
            ranks *= 2
        if rows > BLOCK_ROWS * ranks:
            steps.append(Step(TALL, column, 0, ranks, *follow))
        elif ranks == 1:
            steps.append(Step(SINGLE, column, 8 if rows <= 256 else 16, 1, *follow))
        else:
            while 2 * ranks <= info.max_cluster and 2 * ranks * batch <= info.multiprocessors and rows > 64 * ranks:
                ranks *= 2
            rows_per_lane = 2
            while 32 * rows_per_lane * ranks < rows:
                rows_per_lane *= 2
            steps.append(Step(CLUSTER, column, rows_per_lane, ranks, *follow))
        column += PANEL
    steps.append(Step(WHOLE, column, 4 * -(-(n - column) // 16), 1))
    blocks = batch * max(max(step.ranks, step.panel_ranks, step.larfb_ranks * step.chunks, step.ahead_ranks * step.ahead_chunks) for step in steps)
    if blocks > MAX_BLOCKS:
        return Plan("geqrf", (), f"batch = {batch} needs {blocks} blocks, one launch has at most {MAX_BLOCKS}")
    return Plan(backend, tuple(steps))


# =====================================================================================================================
# CUDA: kernels and host driver (no torch headers: plain nvcc compiles this)
# =====================================================================================================================
CUDA_SOURCE = r"""
// ---------------------------------------------------------------------------------------------------------------------
// Shared device helpers
// ---------------------------------------------------------------------------------------------------------------------
#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <cstdio>
#include <type_traits>
#include <utility>
#if defined(KITTENS_HOPPER) || defined(KITTENS_BLACKWELL)
#include "kittens.cuh"
#endif

using bf16 = __nv_bfloat16;

constexpr int kPanelWidth = 64;                       // nb: columns of a panel
constexpr int kTileBytes = 64 * 64 * sizeof(bf16);    // one 64 x 64 bf16 tile image
constexpr int kPairBytes = 2 * kTileBytes;            // high tile, then low tile
constexpr int kTripleBytes = 3 * kTileBytes;          // high, mid, low

__device__ __forceinline__ uint32_t smem_address(const void* p) { return static_cast<uint32_t>(__cvta_generic_to_shared(p)); }

// Tile image: 64 rows of 128 bytes whose 16-byte pieces are permuted by the row (the 128-byte swizzle of wgmma and
// tcgen05, conflict-free for ldmatrix too). The image in memory and in shared memory is the same, so loads are plain copies.
__device__ __forceinline__ int tile_offset(int row, int column) { return row * 128 + ((2 * column) ^ ((row & 7) << 4)); }

// x = high + low + rounding of 2^-17 |x|; both rounded to nearest. Packs two neighbours. Inf gives low = NaN.
__device__ __forceinline__ void split_bf16(float x, float y, uint32_t& high, uint32_t& low) {
    const __nv_bfloat162 h = __floats2bfloat162_rn(x, y);
    const __nv_bfloat162 l = __floats2bfloat162_rn(x - __low2float(h), y - __high2float(h));
    high = reinterpret_cast<const uint32_t&>(h);
    low = reinterpret_cast<const uint32_t&>(l);
}

// The same in any number of parts; three have all of a float32.
template <int N> __device__ __forceinline__ void split_parts(float x, float y, uint32_t (&part)[N]) {
#pragma unroll
    for (int k = 0; k < N; ++k) {
        const __nv_bfloat162 h = __floats2bfloat162_rn(x, y);
        part[k] = reinterpret_cast<const uint32_t&>(h);
        x -= __uint_as_float(part[k] << 16);
        y -= __uint_as_float(part[k] & 0xffff0000u);
    }
}

// Takes the leading 8 bits off x and y, packed as bf16. Three times take all 24: a float32 is the sum of three bf16 exactly.
__device__ __forceinline__ uint32_t take_bf16(float& x, float& y) {
    const uint32_t high_x = __float_as_uint(x) & 0xffff0000u, high_y = __float_as_uint(y) & 0xffff0000u;
    x -= __uint_as_float(high_x);
    y -= __uint_as_float(high_y);
    return __byte_perm(high_x, high_y, 0x7632);
}

__device__ __forceinline__ void copy_async_16(void* smem, const void* global) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(smem_address(smem)), "l"(global) : "memory");
}
__device__ __forceinline__ void copy_async_4(void* smem, const void* global) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(smem_address(smem)), "l"(global) : "memory");
}
__device__ __forceinline__ void copy_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int N> __device__ __forceinline__ void copy_async_wait() { asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory"); }

__device__ __forceinline__ void copy_async_arrive(uint64_t* bar) {   // once the thread's copies so far have been made
    asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(smem_address(bar)) : "memory");
}

__device__ __forceinline__ void barrier_init(uint64_t* bar, int count) {
    asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(smem_address(bar)), "r"(count) : "memory");
}
__device__ __forceinline__ void barrier_arrive(uint64_t* bar) {
    asm volatile("{.reg .b64 state; mbarrier.arrive.shared.b64 state, [%0];}" ::"r"(smem_address(bar)) : "memory");
}
__device__ __forceinline__ void barrier_wait(uint64_t* bar, int parity) {
    uint32_t done = 0;
    while (!done) {
#if __CUDA_ARCH__ >= 900
        asm volatile("{.reg .pred p; mbarrier.try_wait.parity.shared.b64 p, [%1], %2; selp.u32 %0, 1, 0, p;}"
                     : "=r"(done) : "r"(smem_address(bar)), "r"(parity) : "memory");
#else
        asm volatile("{.reg .pred p; mbarrier.test_wait.parity.shared.b64 p, [%1], %2; selp.u32 %0, 1, 0, p;}"
                     : "=r"(done) : "r"(smem_address(bar)), "r"(parity) : "memory");
#endif
    }
}

// Counts up, once what the thread has read has arrived. Returns the count before.
__device__ __forceinline__ int count_block(int* counter) {
    int before;
    asm volatile("atom.relaxed.cta.shared.add.s32 %0, [%1], 1;" : "=r"(before) : "r"(smem_address(counter)) : "memory");
    return before;
}

// Barriers across a cluster: arrival on the barrier at this place in another block, and a wait that sees what the arriving
// threads (and those they met before) wrote to shared memory anywhere in the cluster.
__device__ __forceinline__ void barrier_arrive_in(uint64_t* bar, uint32_t rank) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
    asm volatile("{.reg .b32 there; mapa.shared::cluster.u32 there, %0, %1; mbarrier.arrive.release.cluster.shared::cluster.b64 _, [there];}"
                 ::"r"(smem_address(bar)), "r"(rank) : "memory");
#endif
}
__device__ __forceinline__ void barrier_wait_cluster(uint64_t* bar, int parity) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
    uint32_t done = 0;
    while (!done)
        asm volatile("{.reg .pred p; mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p;}"
                     : "=r"(done) : "r"(smem_address(bar)), "r"(parity) : "memory");
#endif
}

// One warp copies a (high, low) pair of tiles into shared memory; `full` (barrier_init with kPairArrivals) completes with it.
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
constexpr int kPairArrivals = 1;
#else
constexpr int kPairArrivals = 32;
#endif
__device__ __forceinline__ void load_pair(uint8_t* to, const uint8_t* from, uint64_t* full) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
    if (threadIdx.x % 32 == 0) {
        asm volatile("{.reg .b64 state; mbarrier.arrive.expect_tx.shared.b64 state, [%0], %1;}" ::"r"(smem_address(full)), "r"(kPairBytes) : "memory");
        asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
                     ::"r"(smem_address(to)), "l"(from), "r"(kPairBytes), "r"(smem_address(full)) : "memory");
    }
#else
    for (int at = threadIdx.x % 32 * 16; at < kPairBytes; at += 512) copy_async_16(to + at, from + at);
    copy_async_arrive(full);
#endif
}

// A box of C: 64 rows of 16 float32, 16-byte pieces permuted by the row (the 64-byte swizzle of tensor maps). Loaded by a warp; `full` (barrier_init
// with 1, or with 32 if plain) completes with it. Rows and columns that the matrix does not have come as zeros.
constexpr int kBoxBytes = 64 * 16 * sizeof(float);
__device__ __forceinline__ int box_offset(int row, int column) { return row * 64 + ((4 * column) ^ ((row >> 1 & 3) << 4)); }
__device__ __forceinline__ void load_box_async(uint8_t* to, const CUtensorMap& map, int column, int row, int matrix, uint64_t* full) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
    if (threadIdx.x % 32 == 0) {
        asm volatile("{.reg .b64 state; mbarrier.arrive.expect_tx.shared.b64 state, [%0], %1;}" ::"r"(smem_address(full)), "r"(kBoxBytes) : "memory");
        asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4}], [%5];"
                     ::"r"(smem_address(to)), "l"(&map), "r"(column), "r"(row), "r"(matrix), "r"(smem_address(full)) : "memory");
    }
#endif
}
__device__ __forceinline__ void load_box_plain(uint8_t* to, const float* src, int n, int column, int row, long matrix, uint64_t* full) {
#pragma unroll 4
    for (int e = threadIdx.x % 32; e < 64 * 16; e += 32) {
        const int i = row + e / 16, j = column + e % 16;
        uint8_t* const at = to + box_offset(e / 16, e % 16);
        if (i < n && j < n) copy_async_4(at, src + (matrix * n + i) * n + j);
        else *reinterpret_cast<float*>(at) = 0;
    }
    __syncwarp();                                                           // the zeros too are there for whoever waits
    copy_async_arrive(full);
}

// Ordinary stores to shared memory, before wgmma and tcgen05 (which read through the asynchronous proxy) may see them.
__device__ __forceinline__ void fence_async_proxy() {
#if __CUDA_ARCH__ >= 900
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}

// Ordinary stores to memory, before bulk copies of blocks that are met afterwards may see them.
__device__ __forceinline__ void fence_async_proxy_global() {
#if __CUDA_ARCH__ >= 900
    asm volatile("fence.proxy.async.global;" ::: "memory");
#endif
}

// The next kernel may start beside this one, if it was launched so (Launcher::beside).
__device__ __forceinline__ void allow_next_kernel() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

__device__ __forceinline__ void group_sync(int group) { asm volatile("bar.sync %0, 128;" ::"r"(1 + group) : "memory"); }   // a warpgroup

__device__ __forceinline__ void cluster_arrive() {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
    asm volatile("barrier.cluster.arrive.aligned;" ::: "memory");
#endif
}
__device__ __forceinline__ void cluster_wait() {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
    asm volatile("barrier.cluster.wait.aligned;" ::: "memory");
#endif
}
__device__ __forceinline__ void cluster_sync() {
    cluster_arrive();
    cluster_wait();
}

// Stores to another block's shared memory that tell a barrier there of their bytes: no fence, and no barrier across the cluster, which waits for
// every store to memory under way. The owner of the barrier (barrier_init with 1) says with barrier_expect how many bytes a phase has.
__device__ __forceinline__ void barrier_expect(uint64_t* bar, int bytes) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
    asm volatile("{.reg .b64 state; mbarrier.arrive.expect_tx.shared.b64 state, [%0], %1;}" ::"r"(smem_address(bar)), "r"(bytes) : "memory");
#endif
}
__device__ __forceinline__ void push_four(float* to, uint64_t* bar, uint32_t rank, const float4& x) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
    asm volatile("{.reg .b32 there, full; mapa.shared::cluster.u32 there, %0, %2; mapa.shared::cluster.u32 full, %1, %2;"
                 " st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [there], {%3, %4, %5, %6}, [full];}"
                 ::"r"(smem_address(to)), "r"(smem_address(bar)), "r"(rank), "f"(x.x), "f"(x.y), "f"(x.z), "f"(x.w) : "memory");
#endif
}
template <typename T> __device__ __forceinline__ T* in_rank(T* shared, uint32_t rank) {   // the same place in another block
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
    uint64_t there;
    asm("mapa.u64 %0, %1, %2;" : "=l"(there) : "l"(reinterpret_cast<uint64_t>(shared)), "r"(rank));
    return reinterpret_cast<T*>(there);
#else
    return shared;
#endif
}

// A warp's product of 16 x 16 by 16 x 8: D = A B + C. With g = lane / 4 and t = lane % 4: a[0], a[1] hold k = 2 t and the next of rows g and g + 8,
// a[2], a[3] those plus 8; b0 those of column g, b1 plus 8; C and D columns 2 t and the next of row g, then of row g + 8.
__device__ __forceinline__ void multiply_bf16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, const float (&c)[4]) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%10, %11, %12, %13};"
        : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "f"(c[0]), "f"(c[1]), "f"(c[2]), "f"(c[3]));
}
// Four 8 x 8 bf16 matrices from shared memory, lane l naming row l % 8 of matrix l / 8; each comes as an operand's register, or transposed.
template <bool kTransposed> __device__ __forceinline__ void load_matrices(uint32_t (&f)[4], const uint8_t* row) {
    if (kTransposed) asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                                  : "=r"(f[0]), "=r"(f[1]), "=r"(f[2]), "=r"(f[3]) : "r"(smem_address(row)) : "memory");
    else asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                      : "=r"(f[0]), "=r"(f[1]), "=r"(f[2]), "=r"(f[3]) : "r"(smem_address(row)) : "memory");
}
// Two products' results, side by side, as parts of an operand A (or, registers 0 and 2, 1 and 3 of it, of operands B).
template <int N> __device__ __forceinline__ void pack_step(const float (&left)[4], const float (&right)[4], uint32_t (&a)[N][4]) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
        const float (&from)[4] = e / 2 ? right : left;
        uint32_t part[N];
        split_parts(from[e % 2 * 2], from[e % 2 * 2 + 1], part);
#pragma unroll
        for (int k = 0; k < N; ++k) a[k][e] = part[k];
    }
}

// body(0), ..., body(N - 1), each index a compile-time constant.
template <int N, typename Body> __device__ __forceinline__ void static_for(Body body) {
    [&]<int... I>(std::integer_sequence<int, I...>) { (body(std::integral_constant<int, I>{}), ...); }(std::make_integer_sequence<int, N>{});
}

// Sums of N values over the 32 lanes, every lane getting all N, in an order that depends on nothing but N. Each exchange
// halves the number of values a lane still carries, so 8 values cost 17 shuffles instead of 40.
template <int N, int OFFSET> __device__ __forceinline__ void sum_scatter(float* v) {
    if constexpr (OFFSET > 0) {
        if constexpr (N == 1) {
            v[0] += __shfl_xor_sync(0xffffffffu, v[0], OFFSET);
            sum_scatter<1, OFFSET / 2>(v);
        } else {
            constexpr int H = (N + 1) / 2;
            const bool upper = threadIdx.x & OFFSET;
#pragma unroll
            for (int i = 0; i < H; ++i) {
                if (i + H < N) {
                    const float send = upper ? v[i] : v[i + H], keep = upper ? v[i + H] : v[i];
                    v[i] = keep + __shfl_xor_sync(0xffffffffu, send, OFFSET);
                } else {
                    v[i] += __shfl_xor_sync(0xffffffffu, v[i], OFFSET);
                }
            }
            sum_scatter<H, OFFSET / 2>(v);
        }
    }
}
constexpr __host__ __device__ int sum_lane(int i, int n, int offset) {  // the lane where sum_scatter leaves value i
    if (n == 1 || offset == 0) return 0;
    const int h = (n + 1) / 2;
    return i >= h ? offset + sum_lane(i - h, h, offset / 2) : sum_lane(i, h, offset / 2);
}
template <int N> __device__ __forceinline__ void warp_sum(float (&v)[N]) {
    static_assert(N <= 16, "a lane must end with one value");
    sum_scatter<N, 16>(v);
    if constexpr (N > 1) {
        const float mine = v[0];
#pragma unroll
        for (int i = 0; i < N; ++i) v[i] = __shfl_sync(0xffffffffu, mine, sum_lane(i, N, 16));
    }
}
__device__ __forceinline__ float warp_max(float x) {
#pragma unroll
    for (int o = 16; o; o >>= 1) x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, o));
    return x;
}

// ---------------------------------------------------------------------------------------------------------------------
// larfg: one reflector from alpha and the tail below it
// ---------------------------------------------------------------------------------------------------------------------
// H = I - tau [1; v] [1; v]^T maps [alpha; x] to [beta; 0]: beta = -sign(alpha) |[alpha; x]|, tau = (beta - alpha) / beta,
// v = x / (alpha - beta), as LAPACK's slarfg. alpha - beta never cancels.
struct Reflector { float beta, tau, scale; };

__device__ __forceinline__ Reflector larfg(float alpha, float tail_square) {
    const float square = fmaf(alpha, alpha, tail_square);
    float r, q;
    asm("rsqrt.approx.f32 %0, %1;" : "=f"(r) : "f"(square));
    float root = square * r;
    root = fmaf(fmaf(-root, root, square), 0.5f * r, root);       // one Newton step each: last bits right
    r = fmaf(0.5f * r, fmaf(-square * r, r, 1.0f), r);
    const float denominator = fabsf(alpha) + root;
    asm("rcp.approx.f32 %0, %1;" : "=f"(q) : "f"(denominator));
    q = fmaf(q, fmaf(-denominator, q, 1.0f), q);
    return {-copysignf(root, alpha), fmaf(fabsf(alpha), r, 1.0f), copysignf(q, alpha)};
}

// Sums of squares outside this range may have lost digits to under- or overflow: such a column is scaled first.
__device__ __forceinline__ bool is_safe(float alpha, float tail_square) {
    return tail_square > 1e-20f && fmaf(alpha, alpha, tail_square) < 1e30f;
}
// A power of two that brings `largest` near 1, and its inverse.
__device__ __forceinline__ void scale_for(float largest, float& scale, float& unscale) {
    const int exponent = min(126, static_cast<int>(__float_as_uint(largest) >> 23 & 255) - 127);
    scale = ldexpf(1.0f, -exponent);
    unscale = ldexpf(1.0f, exponent);
}

constexpr float kGrowthLimit = 6.0f, kTailFloor = 1e-3f;
__device__ __forceinline__ float rcp_newton(float x) {
    float q;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(q) : "f"(x));
    return fmaf(q, fmaf(-x, q, 1.0f), q);
}
// One step of a panel's recurrence from its Gram matrix (gram_panel has the theory): from the pivot of G and the diagonal entry of P_top,
// both as they are by then. What passes the guards is far from subnormal.
struct GramStep { float minus_inv_beta, pivot, inv; };
__device__ __forceinline__ GramStep gram_step(float square, float alpha, bool& good) {
    good &= (square > 1e-28f) & (square < 1e30f) & (fmaf(-alpha, alpha, square) > kTailFloor * square);
    float rs;
    asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(rs) : "f"(square));
    rs = fmaf(0.5f * rs, fmaf(-square * rs, rs, 1.0f), rs);
    GramStep h;
    h.minus_inv_beta = copysignf(rs, alpha);
    h.pivot = fmaf(h.minus_inv_beta, square, alpha);                        // alpha - beta
    h.inv = rcp_newton(h.pivot);
    return h;
}

// ---------------------------------------------------------------------------------------------------------------------
// Panel input and output, shared by the geqr2 kernels
// ---------------------------------------------------------------------------------------------------------------------
struct PanelArgs {
    const float* src;      // batch x n x n, row-major: A for the first panel, H later
    float* dst;            // batch x n x n: H
    float* tau;            // batch x n
    uint8_t* v_tiles;      // per matrix row_blocks x (high, low) tile images of V, unit diagonal and zeros above written out
    uint8_t* t;            // per matrix (high, low) tile images of T, upper triangular, zeros written out
    int* redo;             // per matrix: the Gram panel kernel declined; null: it was not asked
    int n, col, row_blocks;
};

// Rows row0 .. row0 + rows of the panel (row 0 is its first diagonal) into shared memory, row-major, pitch W + 4.
template <int W>
__device__ __forceinline__ void load_rows(float* stage, const PanelArgs& p, long matrix, int row0, int rows) {
    const int w = min(W, p.n - p.col);
    const float* src = p.src + (matrix * p.n + p.col + row0) * p.n + p.col;
    if (p.n % 4 == 0) {
        for (int e = threadIdx.x; e < rows * (W / 4); e += blockDim.x) {
            const int i = e / (W / 4), j = e % (W / 4) * 4;
            float* to = stage + i * (W + 4) + j;
            if (j < w) copy_async_16(to, src + static_cast<long>(i) * p.n + j);
            else *reinterpret_cast<float4*>(to) = make_float4(0, 0, 0, 0);
        }
    } else {
        for (int e = threadIdx.x; e < rows * W; e += blockDim.x) {
            const int i = e / W, j = e % W;
            float* to = stage + i * (W + 4) + j;
            if (j < w) copy_async_4(to, src + static_cast<long>(i) * p.n + j);
            else *to = 0;
        }
    }
    copy_async_commit();
    copy_async_wait<0>();
}
template <int W>
__device__ __forceinline__ void store_rows(const float* stage, const PanelArgs& p, long matrix, int row0, int rows) {
    const int w = min(W, p.n - p.col);
    float* dst = p.dst + (matrix * p.n + p.col + row0) * p.n + p.col;
    if (p.n % 4 == 0) {
        for (int e = threadIdx.x; e < rows * (W / 4); e += blockDim.x) {
            const int i = e / (W / 4), j = e % (W / 4) * 4;
            if (j < w) *reinterpret_cast<float4*>(dst + static_cast<long>(i) * p.n + j) = *reinterpret_cast<const float4*>(stage + i * (W + 4) + j);
        }
    } else {
        for (int e = threadIdx.x; e < rows * W; e += blockDim.x) {
            const int i = e / W, j = e % W;
            if (j < w) dst[static_cast<long>(i) * p.n + j] = stage[i * (W + 4) + j];
        }
    }
}

// V of rows row0 .. row0 + rows (a multiple of 64 rows is written; those past `rows` as zeros) as tile images.
__device__ __forceinline__ void store_v_tiles(const float* stage, const PanelArgs& p, long matrix, int row0, int rows) {
    const int w = min(kPanelWidth, p.n - p.col);
    uint8_t* tiles = p.v_tiles + (matrix * p.row_blocks + row0 / 64) * kPairBytes;
    for (int e = threadIdx.x; e < (rows + 63) / 64 * 64 * 8; e += blockDim.x) {
        const int i = e / 8, j = e % 8 * 8;
        uint32_t high[4], low[4];
        float x[8];
#pragma unroll
        for (int c = 0; c < 8; ++c) {
            const int diagonal = row0 + i - (j + c);
            x[c] = i >= rows || diagonal < 0 || j + c >= w ? 0.0f : diagonal == 0 ? 1.0f : stage[i * (kPanelWidth + 4) + j + c];
        }
#pragma unroll
        for (int c = 0; c < 4; ++c) split_bf16(x[2 * c], x[2 * c + 1], high[c], low[c]);
        uint8_t* tile = tiles + static_cast<long>(i / 64) * kPairBytes + tile_offset(i % 64, j);
        *reinterpret_cast<uint4*>(tile) = make_uint4(high[0], high[1], high[2], high[3]);
        *reinterpret_cast<uint4*>(tile + kTileBytes) = make_uint4(low[0], low[1], low[2], low[3]);
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// larft: T from G = V^T V and tau
// ---------------------------------------------------------------------------------------------------------------------
// Doubling: T = [T1, -T1 G12 T2; 0, T2], from 1 x 1 blocks (tau) to 64 x 64. Exact where tau = 0 (row and column vanish).
// Whole block; G (strictly upper part), T and X: 64 x 65 floats in shared memory each (T and X take the stage's place). Ends with T in memory.
constexpr int kTPitch = kPanelWidth + 1;
__device__ __forceinline__ void larft(float* sG, float* sT, float* sX, const float* s_tau, uint8_t* t) {
    for (int e = threadIdx.x; e < kPanelWidth * kPanelWidth; e += blockDim.x) {
        const int i = e / kPanelWidth, j = e % kPanelWidth;
        sT[i * kTPitch + j] = i == j ? s_tau[i] : 0.0f;
    }
    __syncthreads();
    for (int s = 1; s < kPanelWidth; s *= 2) {
        for (int e = threadIdx.x; e < kPanelWidth / 2 * s; e += blockDim.x) {          // X = G12 T2
            const int b = e / (s * s) * 2 * s, i = b + e % (s * s) / s, j = b + s + e % s;
            float x = 0;
            for (int k = b + s; k <= j; ++k) x = fmaf(sG[i * kTPitch + k], sT[k * kTPitch + j], x);
            sX[i * kTPitch + j] = x;
        }
        __syncthreads();
        for (int e = threadIdx.x; e < kPanelWidth / 2 * s; e += blockDim.x) {          // T12 = -T1 X
            const int b = e / (s * s) * 2 * s, i = b + e % (s * s) / s, j = b + s + e % s;
            float x = 0;
            for (int k = i; k < b + s; ++k) x = fmaf(sT[i * kTPitch + k], sX[k * kTPitch + j], x);
            sT[i * kTPitch + j] = -x;
        }
        __syncthreads();
    }
    for (int e = threadIdx.x; e < kPanelWidth * kPanelWidth / 2; e += blockDim.x) {
        const int i = e / (kPanelWidth / 2), j = e % (kPanelWidth / 2) * 2;
        uint32_t high, low;
        split_bf16(sT[i * kTPitch + j], sT[i * kTPitch + j + 1], high, low);
        *reinterpret_cast<uint32_t*>(t + tile_offset(i, j)) = high;
        *reinterpret_cast<uint32_t*>(t + kTileBytes + tile_offset(i, j)) = low;
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// geqr2 of a whole small matrix, in one block's registers
// ---------------------------------------------------------------------------------------------------------------------
// Factors rows and columns col.. of every matrix, at most 16 Q of them; writes H and tau.
//
// Decomposition: one block per matrix, a warp per panel of 16 columns, which it keeps transposed as accumulators of mma: tile b has 16 columns
// of C (M) by rows 8 b .. 8 b + 7 (N), and two tiles, a step of 16 rows, packed as bf16 are an operand A, or two operands B. A warp applies
// the block reflectors of the panels before it, each as soon as it is published, then makes its own. Each application finishes 16 rows of
// R, which are stored, and moves the others up: tile 0 is always at the diagonal, and what comes in at the end are zeros.
//     W = V^T C, Y = T^T W, C -= V Y, transposed, from two bf16 parts of each operand, without low low; for few rows, where n eps is less, from three
// V and T go through shared memory, each panel in a slot of its own, so nobody waits for a reader: V^T as [column][row from the
// panel's first on], at a pitch that is conflict-free for ldmatrix in both directions, and T by rows.
//
// The panel comes from its Gram matrix, as in gram_panel, with the same recurrence and guards, but within a warp: lane i has row i of G, and
// row i of P_top or (lanes 16 to 31) of the identity, which the same steps turn into U^-1. G is high high + mid mid + X + X^T with
// X = high mid + high low. T follows from V^T V and tau = 2 / |v|^2 while others already use V. A panel that the guards decline goes column by
// column in float32, a lane per row, the columns moving one place left each time; so does the last one, whose last column has no tail, a
// lane per column, the rows moving up. A panel with nothing below the diagonal only says so. Slots after a panel's are free until
// its T is published: scratch.
//
// Columns are scaled by powers of two to entries near 1 on the way in (products of columns of 1e-30 and 1e30 stay in range) and R back
// on the way out: neither V nor tau depends on it.
template <int Q> struct Geqr2WholeShape {
    static constexpr int kColumns = 16 * Q, kThreads = 32 * Q, kChunks = (Q + 3) / 4;   // four steps are a chunk: independent products enough
    static constexpr int kParts = Q <= 7 ? 3 : 2;
    static constexpr int kTPitch = 48, kTPart = 16 * kTPitch;                           // in bytes, as all of these
    static constexpr __host__ __device__ int pitch(int panel) { return 128 * ((Q - panel + 3) / 4) + 16; }
    static constexpr __host__ __device__ int part(int panel) { return 16 * pitch(panel); }             // V's; T's follow
    static constexpr __host__ __device__ int slot(int panel) { return kParts * (part(panel) + kTPart); }
    static constexpr int slots() {
        int bytes = 0;
        for (int panel = 0; panel < Q; ++panel) bytes += slot(panel);
        return bytes;
    }
    static constexpr int kBarriers = slots() + 32 * pitch(Q - 1) + 128, kEmpty = kBarriers + 16 * Q;   // after the last panel's scratch
    static constexpr int kSmemBytes = kEmpty + 4 * Q;
    static constexpr int kScratchPitch = 20;                                            // floats; rows or columns of eight lanes meet in no bank
};

__device__ __forceinline__ void load_four(float* x, const float* from) {
    const float4 v = *reinterpret_cast<const float4*>(from);
    x[0] = v.x; x[1] = v.y; x[2] = v.z; x[3] = v.w;
}
// one(a, b) for the products of parts a and b that count, smallest first.
template <int kParts, typename One> __device__ __forceinline__ void whole_products(One one) {
#pragma unroll
    for (int order = kParts - 1; order >= 0; --order)
#pragma unroll
        for (int a = order; a >= 0; --a) one(a, order - a);
}
// Sums of A B over steps, of 16 x 16, apart for products of different parts: short chains, and the small ones are not lost.
struct WholeSums {
    float of[3][2][4] = {};
    template <int kParts> __device__ __forceinline__ void add(const uint32_t (&a)[kParts][4], const uint32_t (&b)[kParts][4]) {
        whole_products<kParts>([&](int i, int j) {
            float (&sum)[2][4] = of[i > j ? 1 : j > 0 ? 2 : 0];
            multiply_bf16(sum[0], a[i], b[j][0], b[j][1], sum[0]);
            multiply_bf16(sum[1], a[i], b[j][2], b[j][3], sum[1]);
        });
    }
    __device__ __forceinline__ float total(int h, int e) const { return of[1][h][e] + of[2][h][e] + of[0][h][e]; }
};

// A column's reflector, all lanes the same; up(scale) is the sum of squares of the scaled tail. False: nothing below, LAPACK leaves the column alone.
template <typename Up> __device__ __forceinline__ bool whole_reflector(float alpha, float square, Reflector& h, float& pivot, float& factor, Up up) {
    h = larfg(alpha, square);
    pivot = alpha - h.beta;
    factor = -h.tau * h.scale;
    if (!__any_sync(0xffffffffu, !(square > 1e-30f))) return true;
    constexpr float kUp = 18446744073709551616.0f;                          // 2^64: underflow, or nothing there; look closer
    const float up_square = up(kUp);
    if (up_square == 0) {
        h = {alpha, 0, 0};
        pivot = factor = 0;
        return false;
    }
    if (fabsf(alpha) < 1e-15f) {
        h = larfg(alpha * kUp, up_square);
        h.beta *= 1 / kUp;
        h.scale *= kUp;
        pivot = alpha - h.beta;
        factor = -h.tau * h.scale;
    }
    return true;
}

template <int Q>
__global__ void __launch_bounds__(32 * Q, 1) geqr2_whole_kernel(const PanelArgs p) {
    using Shape = Geqr2WholeShape<Q>;
    constexpr int kParts = Shape::kParts, kTPart = Shape::kTPart, kTPitch = Shape::kTPitch, kChunks = Shape::kChunks;
    extern __shared__ __align__(16) float smem[];
    uint8_t* slot = reinterpret_cast<uint8_t*>(smem);
    uint64_t* const v_ready = reinterpret_cast<uint64_t*>(slot + Shape::kBarriers), *const t_ready = v_ready + Q;   // one arrival each
    int* const empty = reinterpret_cast<int*>(slot + Shape::kEmpty);        // [panel]: its reflectors are all the identity
    const long matrix = blockIdx.x;
    const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0);         // uniform, and known to be
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, first = 16 * warp, m = p.n - p.col, steps = Q - warp;
    const int low3 = lane & 7, bit3 = lane >> 3 & 1, bit4 = lane >> 4;      // the row of 16 bytes that a lane names for ldmatrix

    if (threadIdx.x < 2 * Q) barrier_init(v_ready + threadIdx.x, 1);
    __syncthreads();
    if (first >= m) return;

    // Entry (b, e) is column g + 8 (e / 2) of the warp's and row 8 b + 2 t + e % 2, of a quarter warp's eight neighbouring columns each.
    const bool has_column[2] = {first + g < m, first + g + 8 < m};
    float acc[2 * Q][4], unscale[2];
    {
        const float* src = p.src + (matrix * p.n + p.col + 2 * t) * p.n + p.col + first + g;
#pragma unroll
        for (int b = 0; b < 2 * Q; ++b, src += 8 * p.n)
#pragma unroll
            for (int e = 0; e < 4; ++e) acc[b][e] = 8 * b + 2 * t + e % 2 < m && has_column[e / 2] ? src[e % 2 * p.n + e / 2 * 8] : 0.0f;
#pragma unroll
        for (int c = 0; c < 2; ++c) {
            float largest = 0, scale;
#pragma unroll
            for (int b = 0; b < 2 * Q; ++b) largest = fmaxf(largest, fmaxf(fabsf(acc[b][2 * c]), fabsf(acc[b][2 * c + 1])));
            largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, 1));
            largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, 2));
            scale_for(largest, scale, unscale[c]);
#pragma unroll
            for (int b = 0; b < 2 * Q; ++b) { acc[b][2 * c] *= scale; acc[b][2 * c + 1] *= scale; }
        }
    }

    float* dst = p.dst + (matrix * p.n + p.col + 2 * t) * p.n + p.col + first + g;
#pragma unroll 1
    for (int q = 0; q < warp; ++q) {                                        // the panels before; step i is theirs, counted from their diagonal
        const int pitch = Shape::pitch(q), part = Shape::part(q);
        uint32_t y[kParts][4] = {};
        barrier_wait(v_ready + q, 0);
        if (!empty[q]) {                                                    // not even 0 times an infinity
            WholeSums w;
            const uint8_t* at = slot + (low3 + 8 * bit4) * pitch + 16 * bit3;
            static_for<kChunks>([&](auto chunk) {
                if (q + 4 * chunk < Q)
#pragma unroll
                    for (int i = 4 * chunk; i < min(4 * chunk + 4, Q); ++i) {
                        uint32_t a[kParts][4], b[kParts][4];
                        pack_step(acc[2 * i], acc[2 * i + 1], a);
#pragma unroll
                        for (int k = 0; k < kParts; ++k) load_matrices<false>(b[k], at + k * part + 32 * i);
                        w.add(a, b);
                    }
            });
            uint32_t a[kParts][4], b[kParts][4];
            float x[2][4];
            const auto pack = [&](float sign) {
#pragma unroll
                for (int h = 0; h < 2; ++h)
#pragma unroll
                    for (int e = 0; e < 4; ++e) x[h][e] = sign * w.total(h, e);
                pack_step(x[0], x[1], a);
            };
            pack(-1.0f);
            barrier_wait(t_ready + q, 0);
#pragma unroll
            for (int k = 0; k < kParts; ++k) load_matrices<true>(b[k], slot + kParts * part + k * kTPart + (low3 + 8 * bit3) * kTPitch + 16 * bit4);
            w = {};
            w.add(a, b);
            pack(1.0f);
#pragma unroll
            for (int k = 0; k < kParts; ++k)
#pragma unroll
                for (int e = 0; e < 4; ++e) y[k][e] = a[k][e];
        }
        float top[2][4];
        const uint8_t* at = slot + (low3 + 8 * bit3) * pitch + 16 * bit4;
        static_for<kChunks>([&](auto chunk) {
            if (q + 4 * chunk < Q) {
#pragma unroll
                for (int i = 4 * chunk; i < min(4 * chunk + 4, Q); ++i) {
                    uint32_t b[kParts][4];
#pragma unroll
                    for (int k = 0; k < kParts; ++k) load_matrices<true>(b[k], at + k * part + 32 * i);
#pragma unroll
                    for (int h = 0; h < 2; ++h) {
                        float (&to)[4] = i ? acc[2 * i - 2 + h] : top[h];
                        bool moved = false;
                        whole_products<kParts>([&](int j, int k) {
                            multiply_bf16(to, y[j], b[k][2 * h], b[k][2 * h + 1], moved ? to : acc[2 * i + h]);
                            moved = true;
                        });
                    }
                }
            }
        });
        static_for<kChunks>([&](auto chunk) {                               // the step that was to come from a chunk left out, and the last
            constexpr int b = 2 * (4 * chunk + 4 < Q ? 4 * chunk + 4 : Q) - 2;
#pragma unroll
            for (int e = 0; e < 8; ++e) acc[b + e / 4][e % 4] = b + 2 < 2 * Q && q + b / 2 + 1 < Q ? acc[b + e / 4][e % 4] : 0.0f;
        });
#pragma unroll
        for (int e = 0; e < 8; ++e)
            if (has_column[e % 4 / 2]) dst[(e / 4 * 8 + e % 2) * p.n + e % 4 / 2 * 8] = top[e / 4][e % 4] * unscale[e % 4 / 2];
        dst += 16 * p.n;
        slot += Shape::slot(q);
    }

    const int pitch = Shape::pitch(warp), part = Shape::part(warp);
    const bool last = first + 16 >= m;
    uint8_t* const trans = slot + (low3 + 8 * bit3) * pitch + 16 * bit4;
    uint8_t* const mine = slot + g * pitch + 4 * t;                         // column g, rows 2 t and 2 t + 1
    // The panel in float32, by columns, goes to the scratch before anything else: the small matrices want the registers.
    float* const scratch = reinterpret_cast<float*>(slot + Shape::slot(warp));
    const int float_pitch = pitch / 2;
    float* const small = scratch + 16 * float_pitch;
    constexpr int kS = Shape::kScratchPitch;
    const auto dump = [&](auto b) {
#pragma unroll
        for (int c = 0; c < 2; ++c)
            *reinterpret_cast<float2*>(scratch + (g + 8 * c) * float_pitch + 8 * b + 2 * t) = make_float2(acc[b][2 * c], acc[b][2 * c + 1]);
    };
    bool good = false;
    int identities = 0;                                                     // bit k: column k's reflector is the identity
    uint32_t inverse[kParts][4];                                            // U^-T
    if (!last) {
        float high[2][4] = {}, mid[2][4] = {}, high_mid[2][4] = {}, high_low[2][4] = {};
        static_for<kChunks>([&](auto chunk) {
            if (4 * chunk < steps)
                static_for<4>([&](auto step) {
                    constexpr int i = 4 * chunk + step;
                    uint32_t a[3][4] = {};
                    if constexpr (i < Q) {
                        dump(std::integral_constant<int, 2 * i>{});
                        dump(std::integral_constant<int, 2 * i + 1>{});
                        pack_step(acc[2 * i], acc[2 * i + 1], a);
                    }
#pragma unroll
                    for (int k = 0; k < kParts; ++k)
#pragma unroll
                        for (int e = 0; e < 4; ++e) *reinterpret_cast<uint32_t*>(mine + k * part + e % 2 * 8 * pitch + e / 2 * 16 + 32 * i) = a[k][e];
                    if (i < Q)
#pragma unroll
                        for (int h = 0; h < 2; ++h) {
                            multiply_bf16(high_low[h], a[0], a[2][h], a[2][h + 2], high_low[h]);
                            multiply_bf16(mid[h], a[1], a[1][h], a[1][h + 2], mid[h]);
                            multiply_bf16(high_mid[h], a[0], a[1][h], a[1][h + 2], high_mid[h]);
                            multiply_bf16(high[h], a[0], a[0][h], a[0][h + 2], high[h]);
                        }
                });
        });
        float* const transposed = small + 16 * kS, *const p_top = transposed + 16 * kS;
#pragma unroll
        for (int h = 0; h < 2; ++h)
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                const int i = g + e / 2 * 8, j = 8 * h + 2 * t + e % 2;
                const float x = high_low[h][e] + high_mid[h][e];
                small[i * kS + j] = high[h][e] + (x + mid[h][e]);
                transposed[j * kS + i] = x;
                p_top[j * kS + i] = acc[h][e];
            }
        __syncwarp();
        const int own = lane % 16;
        float G[16], P[16];
#pragma unroll
        for (int j = 0; j < 16; j += 4) {
            float x[4];
            load_four(G + j, small + own * kS + j);
            load_four(x, transposed + own * kS + j);
            load_four(P + j, p_top + own * kS + j);
#pragma unroll
            for (int c = 0; c < 4; ++c) G[j + c] += x[c];
        }
        const float norm = sqrtf(small[own * (kS + 1)] + transposed[own * (kS + 1)]);
        __syncwarp();
        if (bit4)
#pragma unroll
            for (int j = 0; j < 16; ++j) P[j] = own == j;
        float square = __shfl_sync(0xffffffffu, G[0], 0), alpha = __shfl_sync(0xffffffffu, P[0], 0), minus_inv_beta = 0;
        good = fmaf(-alpha, alpha, square) > kTailFloor * square;
        if (good) {
            // What decides a step's length is known to all lanes before the step: the next pivots come from this step's row and column, not by way
            // of the lane that has them. Rows go round through shared memory, four entries at a time: shuffles, one by one, wait for each other.
            const auto publish = [&](auto k) {                              // row k of G and P
                if (lane == k)
#pragma unroll
                    for (int j = (k + 1) / 4 * 4; j < 16; j += 4) {
                        *reinterpret_cast<float4*>(transposed + k % 2 * 32 + j) = make_float4(G[j], G[j + 1], G[j + 2], G[j + 3]);
                        *reinterpret_cast<float4*>(transposed + k % 2 * 32 + 16 + j) = make_float4(P[j], P[j + 1], P[j + 2], P[j + 3]);
                    }
                __syncwarp();
            };
            publish(std::integral_constant<int, 0>{});
            static_for<16>([&](auto k) {
                constexpr int n = k < 15 ? k + 1 : 15;
                int row = own;
                asm volatile("" : "+r"(row));                               // or all comparisons are made at the start, and packed into bits
                const float next_g = __shfl_sync(0xffffffffu, G[n], n), next_p = __shfl_sync(0xffffffffu, P[n], n), below = __shfl_sync(0xffffffffu, P[k], n);
                float r[16], u[16];
#pragma unroll
                for (int j = (k + 1) / 4 * 4; j < 16; j += 4) {
                    load_four(r + j, transposed + k % 2 * 32 + j);
                    load_four(u + j, transposed + k % 2 * 32 + 16 + j);
                }
                const GramStep h = gram_step(square, alpha, good);
                const float inv_square = h.minus_inv_beta * h.minus_inv_beta;
                const float f = row > k ? G[k] * inv_square : 0.0f;         // rows up to k stay as they are
                P[k] *= h.inv;
#pragma unroll
                for (int j = k + 1; j < 16; ++j) {
                    u[j] = fmaf(h.minus_inv_beta, r[j], u[j]);
                    if (j == k + 1) {
                        square = fmaf(-(r[j] * inv_square), r[j], next_g);
                        alpha = fmaf(-(below * h.inv), u[j], next_p);
                    }
                    G[j] = fmaf(-f, r[j], G[j]);
                    P[j] = fmaf(-P[k], u[j], P[j]);
                }
                minus_inv_beta = row == k ? h.minus_inv_beta : minus_inv_beta;
                if (k < 15) publish(std::integral_constant<int, n>{});
            });
            float growth = 0;
#pragma unroll
            for (int j = 0; j < 16; ++j) growth = fmaxf(growth, fabsf(P[j]));
            good = !__any_sync(0xffffffffu, !(good & (!bit4 | (growth * norm < kGrowthLimit))));
#pragma unroll
            for (int j = 0; j < 16; ++j) P[j] = bit4 || j < own ? P[j] : -minus_inv_beta * G[j];
#pragma unroll
            for (int j = 0; j < 16; j += 4) *reinterpret_cast<float4*>(small + lane * kS + j) = make_float4(P[j], P[j + 1], P[j + 2], P[j + 3]);
            __syncwarp();
            float x[2][4];                                                  // rows: V's columns; as an operand B's, but of A
#pragma unroll
            for (int h = 0; h < 2; ++h)
#pragma unroll
                for (int e = 0; e < 4; ++e) x[h][e] = small[(16 + 8 * h + 2 * t + e % 2) * kS + g + e / 2 * 8];
            pack_step(x[0], x[1], inverse);
        }
    }

    bool nothing = false;                                                   // below the diagonal
    if (!good) {
        uint32_t below = 0;
        if (last) {
            static_for<2 * Q>([&](auto b) { if (b < 2 * steps) dump(b); });
            __syncwarp();
        }
#pragma unroll 1
        for (int row = lane; row < 16 * steps; row += 32)
#pragma unroll
            for (int c = 0; c < 16; ++c) below |= row > c ? __float_as_uint(scratch[c * float_pitch + row]) : 0;
        nothing = !__any_sync(0xffffffffu, (below & 0x7fffffffu) != 0);
        if (nothing) {
            identities = 0xffff;
        } else if (steps == 1) {                                            // rows are few: lane c has column c, row k + r is x[r]
            const int own = lane % 16;
            float* const column = scratch + own * float_pitch;
            float x[16];
#pragma unroll
            for (int r = 0; r < 16; r += 4) load_four(x + r, column + r);
#pragma unroll 1
            for (int k = 0; k < min(16, m - first); ++k) {
                float v[16], squares[4] = {}, sums[4] = {};
                float* const shown = scratch + 16 * float_pitch + k % 2 * 16;   // column k: after all, two by turns
                if (lane == k)
#pragma unroll
                    for (int r = 0; r < 16; r += 4) *reinterpret_cast<float4*>(shown + r) = make_float4(x[r], x[r + 1], x[r + 2], x[r + 3]);
                __syncwarp();
#pragma unroll
                for (int r = 0; r < 16; r += 4) load_four(v + r, shown + r);
#pragma unroll
                for (int r = 1; r < 16; ++r) {
                    squares[r % 4] = fmaf(v[r], v[r], squares[r % 4]);
                    sums[r % 4] = fmaf(v[r], x[r], sums[r % 4]);
                }
                Reflector h;
                float pivot, factor;
                const bool some = whole_reflector(v[0], (squares[0] + squares[1]) + (squares[2] + squares[3]), h, pivot, factor, [&](float scale) {
                    float square = 0;
#pragma unroll
                    for (int r = 1; r < 16; ++r) square = fmaf(v[r] * scale, v[r] * scale, square);
                    return square;
                });
                identities |= !some << k;
                const float f = own > k && some ? factor * fmaf(h.scale, (sums[0] + sums[1]) + (sums[2] + sums[3]), x[0]) : 0.0f;
                if (!bit4) column[k] = own == k ? h.beta : fmaf(f, pivot, x[0]);
                const float by = own == k ? h.scale : f;                    // column k becomes v, which later steps store
#pragma unroll
                for (int r = 1; r < 16; ++r) x[r - 1] = fmaf(by, v[r], own == k ? 0.0f : x[r]);
                x[15] = 0;
            }
            __syncwarp();
        } else {
            constexpr int R = (Q + 1) / 2;
            float x[R][16];
#pragma unroll
            for (int i = 0; i < R; ++i)
#pragma unroll
                for (int c = 0; c < 16; ++c) {
                    x[i][c] = scratch[c * float_pitch + lane + 32 * i];
                    x[i][c] = 2 * i + bit4 < steps ? x[i][c] : 0.0f;
                }
#pragma unroll 1
            for (int k = 0; k < min(16, m - first); ++k) {                  // column k + c is x[.][c]
                float v[R], sums[16] = {};                                  // tail . column
#pragma unroll
                for (int i = 0; i < R; ++i) {
                    v[i] = i || lane > k ? x[i][0] : 0.0f;
                    if (2 * i < steps)
#pragma unroll
                        for (int c = 0; c < 16; ++c) sums[c] = fmaf(v[i], c ? x[i][c] : v[i], sums[c]);
                }
                warp_sum(sums);
                Reflector h;
                float pivot, factor;
                const bool some = whole_reflector(__shfl_sync(0xffffffffu, x[0][0], k), sums[0], h, pivot, factor, [&](float scale) {
                    float square[1] = {};
#pragma unroll
                    for (int i = 0; i < R; ++i) square[0] = fmaf(v[i] * scale, v[i] * scale, square[0]);
                    warp_sum(square);
                    return square[0];
                });
                identities |= !some << k;
#pragma unroll
                for (int i = 0; i < R; ++i)
                    if (lane + 32 * i < 16 * steps)
                        scratch[k * float_pitch + lane + 32 * i] = i || lane > k ? v[i] * h.scale : lane == k ? h.beta : x[0][0];
                v[0] = lane == k ? pivot : v[0];
#pragma unroll
                for (int c = 1; c < 16; ++c) {
                    const float at_row = __shfl_sync(0xffffffffu, x[0][c], k);
                    sums[c] = some ? factor * fmaf(h.scale, sums[c], at_row) : 0.0f;   // not even 0 times an infinity
                }
#pragma unroll
                for (int i = 0; i < R; ++i)
                    if (2 * i < steps)
#pragma unroll
                        for (int c = 1; c < 16; ++c) x[i][c - 1] = fmaf(sums[c], v[i], x[i][c]);
            }
            __syncwarp();
        }
    }

    // H and V, and V's parts where P's were.
    float squares[2] = {};
    WholeSums w;                                                            // V^T V
#pragma unroll 1
    for (int chunk = 0; 4 * chunk < steps; ++chunk) {
        float v[8][4];
        if (good) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                uint32_t b[kParts][4];
#pragma unroll
                for (int k = 0; k < kParts; ++k) load_matrices<true>(b[k], trans + k * part + 128 * chunk + 32 * i);
#pragma unroll
                for (int h = 0; h < 2; ++h) {
                    float (&to)[4] = v[2 * i + h];
                    to[0] = to[1] = to[2] = to[3] = 0;
                    whole_products<kParts>([&](int j, int k) { multiply_bf16(to, inverse[j], b[k][2 * h], b[k][2 * h + 1], to); });
                }
            }
            if (chunk == 0)
#pragma unroll
                for (int e = 0; e < 8; ++e) v[e / 4][e % 4] = small[(e / 4 * 8 + 2 * t + e % 2) * kS + g + e % 4 / 2 * 8];
        } else {
#pragma unroll
            for (int b = 0; b < 8; ++b)
#pragma unroll
                for (int c = 0; c < 2; ++c) {
                    float2 x = make_float2(0, 0);
                    if (8 * chunk + b < 2 * steps) x = *reinterpret_cast<const float2*>(scratch + (g + 8 * c) * float_pitch + 64 * chunk + 8 * b + 2 * t);
                    v[b][2 * c] = x.x; v[b][2 * c + 1] = x.y;
                }
        }
        __syncwarp();                                                       // P's parts have been read
#pragma unroll
        for (int b = 0; b < 8; ++b, dst += 8 * p.n)
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                const int row = 64 * chunk + 8 * b + 2 * t + e % 2, column = g + e / 2 * 8;
                float h = v[b][e];
                if (b < 2) {
                    h *= row <= column ? unscale[e / 2] : 1.0f;
                    v[b][e] = row > column ? v[b][e] : row == column;
                }
                if (first + row < m && has_column[e / 2]) dst[e % 2 * p.n + e / 2 * 8] = h;
                squares[e / 2] = fmaf(v[b][e], v[b][e], squares[e / 2]);
            }
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            uint32_t a[kParts][4], b[kParts][4];
            pack_step(v[2 * i], v[2 * i + 1], a);
#pragma unroll
            for (int k = 0; k < kParts; ++k)
#pragma unroll
                for (int e = 0; e < 4; ++e) {
                    *reinterpret_cast<uint32_t*>(mine + k * part + e % 2 * 8 * pitch + e / 2 * 16 + 128 * chunk + 32 * i) = a[k][e];
                    b[k][e] = a[k][e / 2 + e % 2 * 2];
                }
            w.add(a, b);
        }
    }
    if (lane == 0) empty[warp] = nothing;
    __syncwarp();
    if (lane == 0) barrier_arrive(v_ready + warp);

    float* const t_inverse = scratch;                                       // striu(V^T V), and in column 16 tau
#pragma unroll
    for (int c = 0; c < 2; ++c) {
        squares[c] += __shfl_xor_sync(0xffffffffu, squares[c], 1);
        squares[c] += __shfl_xor_sync(0xffffffffu, squares[c], 2);
        const float tau = identities >> (g + 8 * c) & 1 ? 0.0f : 2.0f * rcp_newton(squares[c]);
        if (t == 0) {
            if (has_column[c]) p.tau[matrix * p.n + p.col + first + g + 8 * c] = tau;
            t_inverse[(g + 8 * c) * kS + 16] = tau;
        }
    }
    if (last || nothing) return;
#pragma unroll
    for (int h = 0; h < 2; ++h)
#pragma unroll
        for (int c = 0; c < 2; ++c)
            *reinterpret_cast<float2*>(t_inverse + (g + 8 * c) * kS + 8 * h + 2 * t) = make_float2(w.total(h, 2 * c), w.total(h, 2 * c + 1));
    __syncwarp();
    float row[16];                                                          // of T: T (striu(V^T V) + diag(1 / tau)) = I
#pragma unroll
    for (int j = 0; j < 16; ++j) row[j] = lane % 16 == j;
#pragma unroll
    for (int j = 0; j < 16; ++j) {
        row[j] *= t_inverse[j * kS + 16];
#pragma unroll
        for (int k = j / 4 * 4; k < 16; k += 4) {
            float x[4];
            load_four(x, t_inverse + j * kS + k);
#pragma unroll
            for (int c = 0; c < 4; ++c)
                if (k + c > j) row[k + c] = fmaf(-row[j], x[c], row[k + c]);
        }
    }
    uint32_t packed[8][kParts];
#pragma unroll
    for (int j = 0; j < 8; ++j) split_parts(row[2 * j], row[2 * j + 1], packed[j]);
    if (!bit4)
#pragma unroll
        for (int k = 0; k < kParts; ++k)
#pragma unroll
            for (int j = 0; j < 8; j += 4)
                *reinterpret_cast<uint4*>(slot + kParts * part + k * kTPart + lane * kTPitch + 4 * j)
                    = make_uint4(packed[j][k], packed[j + 1][k], packed[j + 2][k], packed[j + 3][k]);
    __syncwarp();
    if (lane == 0) barrier_arrive(t_ready + warp);
}

// ---------------------------------------------------------------------------------------------------------------------
// geqr2 of a panel, column by column, in one block's registers
// ---------------------------------------------------------------------------------------------------------------------
// Factors 64 columns, col.., of every matrix that the Gram kernel declined, at most 32 R rows; writes H, tau, V tiles and T. Here too columns are
// scaled by powers of two on the way in, and R back on the way out.
//
// Decomposition: one block per matrix, warp q owns columns CW q .. CW q + CW - 1 over all rows, lane l rows l, l + 32, ...
// The warps form a chain: a warp applies every reflector of the warps before it, then makes its own CW reflectors without
// leaving its registers, publishing each in a slot of shared memory of its own and arriving on that slot's barrier. Nobody
// ever waits for a reader. Shared memory: 32 R x (W + 4) floats, rows on the way in and out, slots in between.
template <int R, int CW, int NW> struct Geqr2Shape {
    static constexpr int kColumns = CW * NW, kRows = 32 * R, kThreads = 32 * NW;
    static constexpr int kStageFloats = kRows * (kColumns + 4);
    static constexpr int kSmemBytes = 4 * kStageFloats + 8 * kColumns + 4 * 2 * kColumns + 4 * kPanelWidth * kTPitch;
    static_assert(32 % CW == 0 && kColumns <= kRows && kColumns == kPanelWidth);
};

template <int R, int CW, int NW>
__global__ void __launch_bounds__(32 * NW, 1) geqr2_kernel(const PanelArgs p) {
    using Shape = Geqr2Shape<R, CW, NW>;
    constexpr int W = Shape::kColumns, M = Shape::kRows, kSegments = (W + 31) / 32;
    extern __shared__ __align__(16) float smem[];
    float* const stage = smem;                                              // M x (W + 4), or W slots of M
    uint64_t* const published = reinterpret_cast<uint64_t*>(smem + Shape::kStageFloats);   // one per column: 32 arrivals
    float* const s_tau = reinterpret_cast<float*>(published + W);
    float* const s_unscale = s_tau + W;                                     // what a column's R is multiplied with on the way out
    float* const sG = s_unscale + W;
    const long matrix = blockIdx.x;
    if (p.redo && !p.redo[matrix]) return;
    const int lane = threadIdx.x % 32, first = threadIdx.x / 32 * CW;
    const int m = p.n - p.col, w = min(W, m);

    load_rows<W>(stage, p, matrix, 0, m);
    for (int j = threadIdx.x; j < W; j += blockDim.x) { barrier_init(published + j, 32); s_tau[j] = 0; }
    for (int e = threadIdx.x; e < kPanelWidth * kTPitch; e += blockDim.x) sG[e] = 0;
    __syncthreads();
    float a[R][CW];
#pragma unroll
    for (int r = 0; r < R; ++r)
#pragma unroll
        for (int j = 0; j < CW; j += 4) {
            const int i = 32 * r + lane;
            const float4 x = i < m ? *reinterpret_cast<const float4*>(stage + i * (W + 4) + first + j) : make_float4(0, 0, 0, 0);
            a[r][j] = x.x; a[r][j + 1] = x.y; a[r][j + 2] = x.z; a[r][j + 3] = x.w;
        }
#pragma unroll
    for (int j = 0; j < CW; ++j) {                                          // entries near 1
        float largest = 0, scale, unscale;
#pragma unroll
        for (int r = 0; r < R; ++r) largest = fmaxf(largest, fabsf(a[r][j]));
        scale_for(warp_max(largest), scale, unscale);
#pragma unroll
        for (int r = 0; r < R; ++r) a[r][j] *= scale;
        if (lane == 0) s_unscale[first + j] = unscale;
    }
    __syncthreads();                                                        // the slots take the stage's place

    // Reflectors of the warps before: C -= tau v (v^T C). Rows above segment k / 32 hold zeros of v.
#pragma unroll
    for (int segment = 0; segment < kSegments; ++segment)
        for (int k = 32 * segment; k < min(32 * segment + 32, min(first, w)); ++k) {
            barrier_wait(published + k, 0);
            const float tau = s_tau[k];
            if (tau == 0) continue;
            float v[R], dot[CW];
#pragma unroll
            for (int r = segment; r < R; ++r) v[r] = stage[k * M + 32 * r + lane];
#pragma unroll
            for (int j = 0; j < CW; ++j) dot[j] = v[segment] * a[segment][j];
#pragma unroll
            for (int r = segment + 1; r < R; ++r)
#pragma unroll
                for (int j = 0; j < CW; ++j) dot[j] = fmaf(v[r], a[r][j], dot[j]);
            warp_sum(dot);
#pragma unroll
            for (int j = 0; j < CW; ++j) dot[j] *= -tau;
#pragma unroll
            for (int r = segment; r < R; ++r)
#pragma unroll
                for (int j = 0; j < CW; ++j) a[r][j] = fmaf(dot[j], v[r], a[r][j]);
        }

    // Own columns. Segment kr, where their diagonal lies, is kept apart in d so that a row index never selects registers.
    const int kr = first / 32;
    float d[CW];
#pragma unroll
    for (int j = 0; j < CW; ++j) d[j] = 0;
    int here[kSegments];                                                    // opaque, or the compiler turns the choice into an index
#pragma unroll
    for (int r = 0; r < kSegments; ++r) {
        here[r] = r == kr;
        asm("" : "+r"(here[r]));
#pragma unroll
        for (int j = 0; j < CW; ++j) d[j] = here[r] ? a[r][j] : d[j];
    }
    static_for<CW>([&](auto index) {
        constexpr int c = index;
        const int k = first + c, kl = k % 32;
        if (k >= w) return;
        float x[R], xd = lane > kl ? d[c] : 0;
#pragma unroll
        for (int r = 0; r < R; ++r) x[r] = r >= kSegments || r > kr ? a[r][c] : 0;
        float sums[CW - c];                                                 // [0]: tail^2, [j - c]: tail . column j
        const float alpha = __shfl_sync(0xffffffffu, d[c], kl);
        auto products = [&] {
#pragma unroll
            for (int j = c; j < CW; ++j) sums[j - c] = xd * (j == c ? xd : d[j]);
#pragma unroll
            for (int r = 0; r < R; ++r)
#pragma unroll
                for (int j = c; j < CW; ++j) sums[j - c] = fmaf(x[r], j == c ? x[r] : a[r][j], sums[j - c]);
            warp_sum(sums);
        };
        products();
        Reflector h;
        if (is_safe(alpha, sums[0])) {
            h = larfg(alpha, sums[0]);
        } else {
            float largest = fabsf(xd);
#pragma unroll
            for (int r = 0; r < R; ++r) largest = fmaxf(largest, fabsf(x[r]));
            largest = warp_max(largest);
            if (largest == 0 && sums[0] == 0) {
                h = {alpha, 0, 0};                                          // nothing below: LAPACK leaves the column alone
            } else {
                float scale, unscale;
                scale_for(fmaxf(largest, fabsf(alpha)), scale, unscale);
                xd *= scale;
#pragma unroll
                for (int r = 0; r < R; ++r) x[r] *= scale;
                products();
                h = larfg(alpha * scale, sums[0]);
                h.beta *= unscale;
            }
        }
        // v, published; then the rest of the warp's own columns
        const float vd = lane == kl ? 1.0f : xd * h.scale;
        stage[k * M + 32 * kr + lane] = vd;
#pragma unroll
        for (int r = 0; r < R; ++r) {
            x[r] *= h.scale;
            if (r >= kSegments || r > kr) stage[k * M + 32 * r + lane] = x[r];
        }
        if (lane == 0) s_tau[k] = h.tau;
        barrier_arrive(published + k);
#pragma unroll
        for (int j = c + 1; j < CW; ++j) {
            const float f = -h.tau * fmaf(h.scale, sums[j - c], __shfl_sync(0xffffffffu, d[j], kl));
            d[j] = fmaf(f, vd, d[j]);
#pragma unroll
            for (int r = 0; r < R; ++r) a[r][j] = fmaf(f, x[r], a[r][j]);
        }
        d[c] = lane < kl ? d[c] : lane == kl ? h.beta : vd;
#pragma unroll
        for (int r = 0; r < R; ++r) a[r][c] = r >= kSegments || r > kr ? x[r] : a[r][c];
    });
#pragma unroll
    for (int r = 0; r < kSegments; ++r)
#pragma unroll
        for (int j = 0; j < CW; ++j) a[r][j] = here[r] ? d[j] : a[r][j];

    // G = V^T V, row by row, for T
    static_for<CW - 1>([&](auto index) {
        constexpr int c = index + 1;
        const int k = first + c;
        float sums[c];
#pragma unroll
        for (int j = 0; j < c; ++j) {
            sums[j] = 0;
#pragma unroll
            for (int r = 0; r < R; ++r) {
                const int i = 32 * r + lane;
                sums[j] = fmaf(i < k ? 0.0f : i == k ? 1.0f : a[r][c], a[r][j], sums[j]);
            }
        }
        warp_sum(sums);
        if (lane == 0 && k < w)
#pragma unroll
            for (int j = 0; j < c; ++j) sG[(first + j) * kTPitch + k] = sums[j];
    });
#pragma unroll
    for (int segment = 0; segment < kSegments; ++segment)
        for (int k = max(32 * segment, first + CW); k < min(32 * segment + 32, w); ++k) {
            barrier_wait(published + k, 0);
            float sums[CW];
#pragma unroll
            for (int j = 0; j < CW; ++j) sums[j] = 0;
#pragma unroll
            for (int r = segment; r < R; ++r) {
                const float v = stage[k * M + 32 * r + lane];
#pragma unroll
                for (int j = 0; j < CW; ++j) sums[j] = fmaf(v, a[r][j], sums[j]);
            }
            warp_sum(sums);
            if (lane == 0)
#pragma unroll
                for (int j = 0; j < CW; ++j) sG[(first + j) * kTPitch + k] = sums[j];
        }
    __syncthreads();                                                        // everyone is done with the slots
#pragma unroll
    for (int j = 0; j < CW; ++j)
#pragma unroll
        for (int r = 0; r < kSegments; ++r) a[r][j] *= 32 * r + lane <= first + j ? s_unscale[first + j] : 1.0f;
#pragma unroll
    for (int r = 0; r < R; ++r)
#pragma unroll
        for (int j = 0; j < CW; j += 4)
            *reinterpret_cast<float4*>(stage + (32 * r + lane) * (W + 4) + first + j) = make_float4(a[r][j], a[r][j + 1], a[r][j + 2], a[r][j + 3]);
    for (int j = threadIdx.x; j < w; j += blockDim.x) p.tau[matrix * p.n + p.col + j] = s_tau[j];
    __syncthreads();
    store_rows<W>(stage, p, matrix, 0, m);
    store_v_tiles(stage, p, matrix, 0, m);
    __syncthreads();
    larft(sG, stage, stage + kPanelWidth * kTPitch, s_tau, p.t + matrix * kPairBytes);
}

// ---------------------------------------------------------------------------------------------------------------------
// geqr2 across a cluster: panels too tall for one block
// ---------------------------------------------------------------------------------------------------------------------
// The same factorization with the rows dealt to the blocks of a cluster, 32 R consecutive rows each. Warps own 4 columns
// and go through all columns k in step: the owner publishes its raw column in shared memory, every warp takes the products
// of that tail with its own columns, and the partial sums meet once per column: each block pushes its 10 numbers to the
// same warp of every block (st.async, which carries its own arrival), and each adds them in rank order. Columns already
// factored take part too: their products are the entries of V^T V.
// A message: tail^2, tail . 4 columns, alpha, the 4 columns' entries in row k (the last five from rank 0, where the diagonal
// lies). Two buffers are enough: nobody sends message t + 2 before everybody's message t + 1 has come.
constexpr int kMessage = 12, kMaxCluster = 16;
template <int R> struct Geqr2ClusterShape {
    static constexpr int CW = 4, NW = 16, kRows = 32 * R, kThreads = 32 * NW;
    static constexpr int kStageFloats = kRows * (kPanelWidth + 4) > 2 * kPanelWidth * kTPitch ? kRows * (kPanelWidth + 4) : 2 * kPanelWidth * kTPitch;
    static constexpr int kSmemBytes = 4 * kStageFloats + 8 * (kPanelWidth + 2 * NW) + 4 * NW * 2 * kMaxCluster * kMessage
                                      + 4 * 3 * kPanelWidth + 4 * kPanelWidth * kTPitch;
};

template <int R>
__global__ void __launch_bounds__(512, 1) geqr2_cluster_kernel(const PanelArgs p) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
    using Shape = Geqr2ClusterShape<R>;
    constexpr int CW = Shape::CW, NW = Shape::NW, W = kPanelWidth, M = Shape::kRows;
    extern __shared__ __align__(16) float smem[];
    float* const stage = smem;
    uint64_t* const published = reinterpret_cast<uint64_t*>(smem + Shape::kStageFloats);   // one per column: 32 arrivals
    uint64_t* const met = published + W;                                    // two per warp: one arrival and the messages' bytes
    float* const mail = reinterpret_cast<float*>(met + 2 * NW);             // per warp, buffer, rank: one message
    float* const s_tau = mail + NW * 2 * kMaxCluster * kMessage;
    float* const s_alpha = s_tau + W;
    float* const s_unscale = s_alpha + W;
    float* const sG = s_unscale + W;
    uint32_t rank, ranks;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    asm("mov.u32 %0, %%cluster_nctarank;" : "=r"(ranks));
    const long matrix = blockIdx.x / ranks;
    if (p.redo && !p.redo[matrix]) return;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, first = warp * CW;
    const int m = p.n - p.col, w = min(W, m), row0 = rank * M, rows = max(0, min(M, m - row0));

    load_rows<W>(stage, p, matrix, row0, rows);
    for (int j = threadIdx.x; j < W; j += blockDim.x) { barrier_init(published + j, 32); s_tau[j] = 0; s_alpha[j] = 0; }
    if (threadIdx.x < 2 * NW) barrier_init(met + threadIdx.x, 1);
    for (int e = threadIdx.x; e < W * kTPitch; e += blockDim.x) sG[e] = 0;
    __syncthreads();
    float a[R][CW];
#pragma unroll
    for (int r = 0; r < R; ++r) {
        const int i = 32 * r + lane;
        const float4 x = i < rows ? *reinterpret_cast<const float4*>(stage + i * (W + 4) + first) : make_float4(0, 0, 0, 0);
        a[r][0] = x.x; a[r][1] = x.y; a[r][2] = x.z; a[r][3] = x.w;
    }
    cluster_sync();

    int turn = 0;                                                           // messages sent so far
    float* const inbox = mail + warp * 2 * kMaxCluster * kMessage;
    uint32_t remote_mail = 0, remote_met = 0;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote_mail) : "r"(smem_address(inbox + rank * kMessage)), "r"(lane % ranks));
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote_met) : "r"(smem_address(met + 2 * warp)), "r"(lane % ranks));
    auto meet = [&](float (&v)[10], bool maximum) {                         // v: sum (or maximum) over the cluster
        const int buffer = turn & 1;
        if (lane == 0)
            asm volatile("{.reg .b64 state; mbarrier.arrive.expect_tx.shared.b64 state, [%0], %1;}" ::"r"(smem_address(met + 2 * warp + buffer)),
                         "r"(ranks * kMessage * 4) : "memory");
        if (lane < ranks) {
            const uint32_t to = remote_mail + buffer * kMaxCluster * kMessage * 4, bar = remote_met + 8 * buffer;
            asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];"
                         ::"r"(to), "f"(v[0]), "f"(v[1]), "f"(v[2]), "f"(v[3]), "r"(bar) : "memory");
            asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];"
                         ::"r"(to + 16), "f"(v[4]), "f"(v[5]), "f"(v[6]), "f"(v[7]), "r"(bar) : "memory");
            asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];"
                         ::"r"(to + 32), "f"(v[8]), "f"(v[9]), "f"(0.0f), "f"(0.0f), "r"(bar) : "memory");
        }
        barrier_wait(met + 2 * warp + buffer, (turn >> 1) & 1);
        const float* from = inbox + buffer * kMaxCluster * kMessage + (lane < 10 ? lane : 0);
        float sum = from[0];
        for (uint32_t q = 1; q < ranks; ++q) sum = maximum ? fmaxf(sum, from[q * kMessage]) : sum + from[q * kMessage];
#pragma unroll
        for (int i = 0; i < 10; ++i) v[i] = __shfl_sync(0xffffffffu, sum, i);
        ++turn;
    };
    {                                                                       // columns to entries near 1
        float largest[10] = {};
#pragma unroll
        for (int j = 0; j < CW; ++j) {
#pragma unroll
            for (int r = 0; r < R; ++r) largest[j] = fmaxf(largest[j], fabsf(a[r][j]));
            largest[j] = warp_max(largest[j]);
        }
        meet(largest, true);
#pragma unroll
        for (int j = 0; j < CW; ++j) {
            float scale, unscale;
            scale_for(largest[j], scale, unscale);
#pragma unroll
            for (int r = 0; r < R; ++r) a[r][j] *= scale;
            if (lane == 0) s_unscale[first + j] = unscale;
        }
        __syncwarp();
    }
    auto publish = [&](int k) {                                             // the raw tail of column k, by its owner
#pragma unroll
        for (int r = 0; r < R; ++r) {
            float x = 0;
#pragma unroll
            for (int j = 0; j < CW; ++j) x = first + j == k ? a[r][j] : x;
            const int i = row0 + 32 * r + lane;
            stage[k * M + 32 * r + lane] = i > k ? x : 0;
            if (i == k) s_alpha[k] = x;
        }
        barrier_arrive(published + k);
    };
    if (first == 0) publish(0);
    for (int k = 0; k < w; ++k) {
        barrier_wait(published + k, 0);
        float x[R], v[10];
#pragma unroll
        for (int r = 0; r < R; ++r) x[r] = stage[k * M + 32 * r + lane];
        float at_row[CW];
#pragma unroll
        for (int j = 0; j < CW; ++j) at_row[j] = rank ? 0.0f : __shfl_sync(0xffffffffu, k < 32 ? a[0][j] : a[1][j], k % 32);
        const float own_alpha = rank ? 0.0f : s_alpha[k];
        auto products = [&] {
            float sums[5] = {};
#pragma unroll
            for (int r = 0; r < R; ++r) {
                sums[0] = fmaf(x[r], x[r], sums[0]);
#pragma unroll
                for (int j = 0; j < CW; ++j) sums[1 + j] = fmaf(x[r], a[r][j], sums[1 + j]);
            }
            warp_sum(sums);
#pragma unroll
            for (int i = 0; i < 5; ++i) v[i] = sums[i];
            v[5] = own_alpha;
#pragma unroll
            for (int j = 0; j < CW; ++j) v[6 + j] = at_row[j];
            meet(v, false);
        };
        products();
        const float alpha = v[5];
        Reflector h;
        if (is_safe(alpha, v[0])) {
            h = larfg(alpha, v[0]);
        } else {
            float largest[10] = {};
#pragma unroll
            for (int r = 0; r < R; ++r) largest[0] = fmaxf(largest[0], fabsf(x[r]));
            largest[0] = warp_max(largest[0]);
            meet(largest, true);
            if (largest[0] == 0 && v[0] == 0) {
                h = {alpha, 0, 0};
            } else {
                float scale, unscale;
                scale_for(fmaxf(largest[0], fabsf(alpha)), scale, unscale);
#pragma unroll
                for (int r = 0; r < R; ++r) x[r] *= scale;
                products();
                h = larfg(alpha * scale, v[0]);
                h.beta *= unscale;
            }
        }
        const bool on_row = rank == 0 && lane == k % 32;
#pragma unroll
        for (int j = 0; j < CW; ++j) {
            const int column = first + j;
            const float product = fmaf(h.scale, v[1 + j], v[6 + j]);        // v_k^T c_j, or v_k^T v_j
            if (column > k && h.tau != 0) {
                const float f = -h.tau * product, g = f * h.scale;
#pragma unroll
                for (int r = 0; r < R; ++r) a[r][j] = fmaf(g, x[r], a[r][j]);
                if (on_row) {
                    if (k < 32) a[0][j] += f; else a[1][j] += f;
                }
            } else if (column < k) {
                if (lane == 0) sG[column * kTPitch + k] = product;
            } else if (column == k) {
                if (lane == 0) s_tau[k] = h.tau;
#pragma unroll
                for (int r = 0; r < R; ++r) {
                    const int i = row0 + 32 * r + lane;
                    a[r][j] = i > k ? x[r] * h.scale : i == k ? h.beta : a[r][j];
                }
            }
        }
        if (k + 1 < w && first <= k + 1 && k + 1 < first + CW) publish(k + 1);
    }
    __syncthreads();
    if (rank == 0)
#pragma unroll
        for (int r = 0; r < 2; ++r)
#pragma unroll
            for (int j = 0; j < CW; ++j) a[r][j] *= 32 * r + lane <= first + j ? s_unscale[first + j] : 1.0f;
#pragma unroll
    for (int r = 0; r < R; ++r)
        *reinterpret_cast<float4*>(stage + (32 * r + lane) * (W + 4) + first) = make_float4(a[r][0], a[r][1], a[r][2], a[r][3]);
    if (rank == 0)
        for (int j = threadIdx.x; j < w; j += blockDim.x) p.tau[matrix * p.n + p.col + j] = s_tau[j];
    __syncthreads();
    store_rows<W>(stage, p, matrix, row0, rows);
    if (rows > 0) store_v_tiles(stage, p, matrix, row0, rows);
    __syncthreads();
    if (rank == 0) larft(sG, stage, stage + W * kTPitch, s_tau, p.t + matrix * kPairBytes);
    cluster_sync();   // no mail to a block that is gone
#endif
}

// ---------------------------------------------------------------------------------------------------------------------
// geqr2 in memory: panels taller than a cluster's registers, and tall ones on devices without clusters
// ---------------------------------------------------------------------------------------------------------------------
// The same factorization with the panel left in H, 64 rows at a time dealt to the blocks of a cluster (or to one block). A
// warp takes every 16th row of its block, a lane two neighbouring columns; nobody else ever touches those entries. Two
// passes over the rows per column: the products of its tail with all columns, and the update.
struct Geqr2TallShape {
    static constexpr int kWarps = 16, kThreads = 32 * kWarps;
    static constexpr int kStageFloats = 2 * kPanelWidth * kTPitch > 64 * (kPanelWidth + 4) ? 2 * kPanelWidth * kTPitch : 64 * (kPanelWidth + 4);
    static constexpr int kMessage = 2 * kPanelWidth;                        // 64 sums, 64 entries of row k
    static constexpr int kSmemBytes = 4 * (kStageFloats + kPanelWidth * kTPitch + kWarps * kPanelWidth + kMaxCluster * kMessage + kMessage + kPanelWidth);
};

__global__ void __launch_bounds__(Geqr2TallShape::kThreads, 1) geqr2_tall_kernel(const PanelArgs p) {
    using Shape = Geqr2TallShape;
    constexpr int W = kPanelWidth, kWarps = Shape::kWarps, kMessage = Shape::kMessage;
    extern __shared__ __align__(16) float smem[];
    float* const stage = smem;
    float* const sG = stage + Shape::kStageFloats;
    float* const partial = sG + W * kTPitch;                                // per warp: 64 sums
    float* const mail = partial + kWarps * W;                               // per rank: a message
    float* const total = mail + kMaxCluster * kMessage;                     // the messages' sum
    float* const s_tau = total + kMessage;
    uint32_t rank = 0, ranks = 1;
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    asm("mov.u32 %0, %%cluster_nctarank;" : "=r"(ranks));
#endif
    const long matrix = blockIdx.x / ranks;
    if (p.redo && !p.redo[matrix]) return;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, c = 2 * lane, m = p.n - p.col;
    const int tile0 = static_cast<long>(p.row_blocks) * rank / ranks, tile1 = static_cast<long>(p.row_blocks) * (rank + 1) / ranks;
    const int row0 = 64 * tile0, row1 = min(64 * tile1, m);
    const float* const src = p.src + (matrix * p.n + p.col) * p.n + p.col + c;
    float* const dst = p.dst + (matrix * p.n + p.col) * p.n + p.col + c;

    for (int e = threadIdx.x; e < W * kTPitch; e += blockDim.x) sG[e] = 0;
    // total = value summed over warps and ranks, or its maximum; each lane brings its two columns' values, `row` goes along
    auto meet = [&](float2 value, float2 row, bool maximum) {
        *reinterpret_cast<float2*>(partial + warp * W + c) = value;
        __syncthreads();
        if (threadIdx.x < W) {
            float t = partial[threadIdx.x];
            for (int q = 1; q < kWarps; ++q) t = maximum ? fmaxf(t, partial[q * W + threadIdx.x]) : t + partial[q * W + threadIdx.x];
            for (uint32_t q = 0; q < ranks; ++q) in_rank(mail, q)[rank * kMessage + threadIdx.x] = t;
        }
        if (warp == 0)                                                      // 0 from all ranks but the one that has the row
            for (uint32_t q = 0; q < ranks; ++q) *reinterpret_cast<float2*>(in_rank(mail, q) + rank * kMessage + W + c) = row;
        if (ranks > 1) cluster_sync();
        else __syncthreads();
        if (threadIdx.x < kMessage) {
            float t = mail[threadIdx.x];
            for (uint32_t q = 1; q < ranks; ++q) t = maximum ? fmaxf(t, mail[q * kMessage + threadIdx.x]) : t + mail[q * kMessage + threadIdx.x];
            total[threadIdx.x] = t;
        }
        if (ranks > 1) cluster_sync();                                      // the mail is read: it may be overwritten
        else __syncthreads();
    };
    float2 largest = make_float2(0, 0), scales, unscales;                     // columns to entries near 1, and R back in the end
    for (int i = row0 + warp; i < row1; i += kWarps) {
        const float* const at = src + static_cast<long>(i) * p.n;
        largest = make_float2(fmaxf(largest.x, fabsf(at[0])), fmaxf(largest.y, fabsf(at[1])));
    }
    meet(largest, make_float2(0, 0), true);
    scale_for(total[c], scales.x, unscales.x);
    scale_for(total[c + 1], scales.y, unscales.y);
    for (int i = row0 + warp; i < row1; i += kWarps) {
        const long at = static_cast<long>(i) * p.n;
        dst[at] = src[at] * scales.x;
        dst[at + 1] = src[at + 1] * scales.y;
    }
    // body(row, first entry, second entry, the row's entry in column k) over the warp's rows below row k
    auto below = [&](int k, auto body) {
        for (int i = max(row0, k + 1) / kWarps * kWarps + warp; i < row1; i += kWarps) {
            if (i <= k || i < row0) continue;
            const long at = static_cast<long>(i) * p.n;
            const float2 y = make_float2(dst[at], dst[at + 1]);
            body(at, y, __shfl_sync(0xffffffffu, k % 2 ? y.y : y.x, k / 2));
        }
    };
    for (int k = 0; k < W; ++k) {
        const long diagonal = static_cast<long>(k) * p.n;
        float2 row = make_float2(0, 0);                                     // row k: its owner's warp writes it, warp 0 sends it
        __syncthreads();
        if (warp == 0 && row0 <= k && k < row1) row = make_float2(dst[diagonal], dst[diagonal + 1]);
        auto products = [&](float scale) {
            float2 sum = make_float2(0, 0);
            below(k, [&](long, float2 y, float x) {
                x *= scale;
                sum.x = fmaf(x, c == k ? x : y.x, sum.x);
                sum.y = fmaf(x, c + 1 == k ? x : y.y, sum.y);
            });
            meet(sum, row, false);
        };
        products(1.0f);
        const float alpha = total[W + k];
        float scale = 1.0f;
        Reflector h;
        if (is_safe(alpha, total[k])) {
            h = larfg(alpha, total[k]);
        } else {
            const float square = total[k];
            float2 largest = make_float2(0, 0);
            below(k, [&](long, float2, float x) { largest.x = fmaxf(largest.x, fabsf(x)); });
            meet(make_float2(largest.x, largest.x), make_float2(0, 0), true);
            if (total[0] == 0 && square == 0) {
                h = {alpha, 0, 0};                                          // nothing below: LAPACK leaves the column alone
            } else {
                float unscale;
                scale_for(fmaxf(total[0], fabsf(alpha)), scale, unscale);
                products(scale);
                h = larfg(alpha * scale, total[k]);
                h.beta *= unscale;
            }
            if (h.tau == 0) meet(make_float2(0, 0), row, false);            // `total` holds row k again
        }
        const float2 product = make_float2(fmaf(h.scale, total[c], total[W + c]), fmaf(h.scale, total[c + 1], total[W + c + 1]));   // v_k^T column
        if (warp == 0 && rank == 0) {
            if (c < k) sG[c * kTPitch + k] = product.x;
            if (c + 1 < k) sG[(c + 1) * kTPitch + k] = product.y;
            if (lane == 0) s_tau[k] = h.tau;
        }
        if (h.tau == 0) continue;
        const float2 f = make_float2(c > k ? -h.tau * product.x : 0.0f, c + 1 > k ? -h.tau * product.y : 0.0f);
        below(k, [&](long at, float2 y, float x) {
            const float v = x * scale * h.scale;
            dst[at] = c == k ? v : fmaf(f.x, v, y.x);
            dst[at + 1] = c + 1 == k ? v : fmaf(f.y, v, y.y);
        });
        if (row0 <= k && k < row1 && warp == k % kWarps) {
            dst[diagonal] = c == k ? h.beta : total[W + c] + f.x;
            dst[diagonal + 1] = c + 1 == k ? h.beta : total[W + c + 1] + f.y;
        }
    }
    __syncthreads();
    for (int i = row0 + warp; i < min(row1, W); i += kWarps) {
        const long at = static_cast<long>(i) * p.n;
        if (i <= c) dst[at] *= unscales.x;
        if (i <= c + 1) dst[at + 1] *= unscales.y;
    }
    __syncthreads();
    if (rank == 0 && threadIdx.x < W) p.tau[matrix * p.n + p.col + threadIdx.x] = s_tau[threadIdx.x];
    PanelArgs finished = p;
    finished.src = p.dst;
    for (int i = row0; i < row1; i += 64) {
        load_rows<W>(stage, finished, matrix, i, min(64, row1 - i));
        __syncthreads();
        store_v_tiles(stage, p, matrix, i, min(64, row1 - i));
        __syncthreads();
    }
    if (rank == 0) larft(sG, stage, stage + W * kTPitch, s_tau, p.t + matrix * kPairBytes);
}

// ---------------------------------------------------------------------------------------------------------------------
// Products of 64-column tiles in three instruction sets
// ---------------------------------------------------------------------------------------------------------------------
// Operands are tile images in shared memory, or registers. A product of split operands is high high + high low + low high in
// float32, dropping low low (2^-16 of each term). Result: float pairs [n8 block][row half], lane l has rows l / 4 (+ 8) of its
// warp's 16 and columns 8 block + 2 (l % 4), + 1. Interface, all calls by whole warpgroups:
//   start(a, b)          256 threads, A B with A of 128 rows (two tiles, one after the other; the low tiles follow kALow and kBLow
//                      bytes after the high ones), B 64 x 64. finish() waits, read(result) fetches; the warp's rows start at row_of_warp()
//   start_exact(a, b)    a warpgroup's own product of 64 x 64 operands, each high + mid + low (three tiles): all products but
//                      mid low and low low, as good as float32
//   start_pairs<form, sum>(a, b, clear)   a warpgroup's own product of two (high, low) pairs, added to its sum 0 (if not said) unless clear
//   start_registers<form, first, count>(a, b, stage, clear)   a warpgroup's own products of an Operand A and `count` (high, low) pairs B, one after
//                      the other in memory, added to its sums first, first + 1 .. unless clear; stage (a pair) unused otherwise until finish_group
//   finish_group(), read_group<i>(result)   for these three (sum 0 if not said); warp w has rows 16 (w % 4) ...
//   close()              by the whole block, once, when it needs no product any more
// Forms: kAtB: A given as its transpose. kABt: B as its transpose.
enum class Form { kAtB, kAB, kABt };

struct Fragment { float2 v[8][2]; };

// A warpgroup's 64 x 64 operand A in two bf16 parts, [k16 step][register]: registers 0 and 2 hold row l / 4 of the warp's 16, 1 and 3
// row l / 4 + 8; 0 and 1 hold k = 16 step + 2 (l % 4) and the next, 2 and 3 those plus 8.
struct Operand { uint32_t high[4][4], low[4][4]; };
__device__ __forceinline__ void split(Operand& a, const Fragment& f) {     // a result's columns become the next product's k
#pragma unroll
    for (int s = 0; s < 4; ++s)
#pragma unroll
        for (int r = 0; r < 4; ++r) split_bf16(f.v[2 * s + r / 2][r % 2].x, f.v[2 * s + r / 2][r % 2].y, a.high[s][r], a.low[s][r]);
}

// one(clear, a part, b part) for each product of parts that start_exact counts, smallest first
template <typename One> __device__ __forceinline__ void products_of_parts(const uint8_t* a, const uint8_t* b, One one) {
    constexpr int kMid = kTileBytes, kLow = 2 * kTileBytes;
    one(std::true_type{}, a + kLow, b);
    one(std::false_type{}, a, b + kLow);
    one(std::false_type{}, a + kMid, b + kMid);
    one(std::false_type{}, a + kMid, b);
    one(std::false_type{}, a, b + kMid);
    one(std::false_type{}, a, b);
}

template <int kSums> struct MmaSync {
    Fragment sums[kSums];
    static constexpr bool kAsync = false, kStaged = false;
    __device__ __forceinline__ static int row_of_warp() { return threadIdx.x / 32 * 16; }
    __device__ MmaSync(uint64_t*, uint32_t*) {}
    __device__ __forceinline__ static void load(uint32_t (&f)[4], const uint8_t* tile, int row, int column, bool transposed) {
        const uint8_t* const at = tile + tile_offset(row, column);
        if (transposed) load_matrices<true>(f, at);
        else load_matrices<false>(f, at);
    }
    __device__ __forceinline__ static void multiply(float2 (&c)[2], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
        asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                     : "+f"(c[0].x), "+f"(c[0].y), "+f"(c[1].x), "+f"(c[1].y) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
    }
    template <Form kForm, int kSum = 0> __device__ __forceinline__ void one(const uint8_t* a, const uint8_t* b) {
        Fragment& sum = sums[kSum];
        const int lane = threadIdx.x % 32, low3 = lane & 7, bit3 = lane >> 3 & 1, bit4 = lane >> 4, m0 = threadIdx.x / 32 % 4 * 16;
#pragma unroll
        for (int k0 = 0; k0 < 64; k0 += 16) {
            uint32_t fa[4];
            if (kForm == Form::kAtB) load(fa, a, k0 + low3 + 8 * bit4, m0 + 8 * bit3, true);
            else load(fa, a, m0 + low3 + 8 * bit3, k0 + 8 * bit4, false);
#pragma unroll
            for (int n0 = 0; n0 < 64; n0 += 16) {
                uint32_t fb[4];
                if (kForm == Form::kABt) load(fb, b, n0 + low3 + 8 * bit4, k0 + 8 * bit3, false);
                else load(fb, b, k0 + low3 + 8 * bit3, n0 + 8 * bit4, true);
                multiply(sum.v[n0 / 8], fa, fb[0], fb[1]);
                multiply(sum.v[n0 / 8 + 1], fa, fb[2], fb[3]);
            }
        }
    }
    __device__ __forceinline__ void reset(Fragment& sum) {
#pragma unroll
        for (int i = 0; i < 16; ++i) sum.v[i / 2][i % 2] = make_float2(0, 0);
    }
    template <int kALow, int kBLow> __device__ __forceinline__ void start(const uint8_t* a, const uint8_t* b) {
        a += threadIdx.x / 128 * kTileBytes;
        reset(sums[0]);
        one<Form::kAB>(a + kALow, b);
        one<Form::kAB>(a, b + kBLow);
        one<Form::kAB>(a, b);
    }
    template <Form kForm> __device__ __forceinline__ void start_exact(const uint8_t* a, const uint8_t* b) {
        reset(sums[0]);
        products_of_parts(a, b, [&](auto, const uint8_t* a_part, const uint8_t* b_part) { one<kForm>(a_part, b_part); });
    }
    template <Form kForm, int kSum = 0> __device__ __forceinline__ void start_pairs(const uint8_t* a, const uint8_t* b, bool clear) {
        if (clear) reset(sums[kSum]);
        one<kForm, kSum>(a + kTileBytes, b);
        one<kForm, kSum>(a, b + kTileBytes);
        one<kForm, kSum>(a, b);
    }
    template <Form kForm, int kFirst, int kCount> __device__ __forceinline__ void start_registers(const Operand& a, const uint8_t* b, uint8_t*, bool clear) {
#pragma unroll
        for (int i = 0; i < kCount; ++i) {
            if (clear) reset(sums[kFirst + i]);
            multiply_registers<kForm>(sums[kFirst + i], a, b + i * kPairBytes);
        }
    }
    template <Form kForm> __device__ __forceinline__ void multiply_registers(Fragment& sum, const Operand& a, const uint8_t* b) {
        const int lane = threadIdx.x % 32, low3 = lane & 7, bit3 = lane >> 3 & 1, bit4 = lane >> 4;
#pragma unroll
        for (int s = 0; s < 4; ++s)
#pragma unroll
            for (int n0 = 0; n0 < 64; n0 += 16) {
                const int row = kForm == Form::kABt ? n0 + low3 + 8 * bit4 : 16 * s + low3 + 8 * bit3;
                const int column = kForm == Form::kABt ? 16 * s + 8 * bit3 : n0 + 8 * bit4;
                uint32_t high[4], low[4];
                load(high, b, row, column, kForm != Form::kABt);
                load(low, b + kTileBytes, row, column, kForm != Form::kABt);
#pragma unroll
                for (int h = 0; h < 2; ++h) {
                    multiply(sum.v[n0 / 8 + h], a.low[s], high[2 * h], high[2 * h + 1]);
                    multiply(sum.v[n0 / 8 + h], a.high[s], low[2 * h], low[2 * h + 1]);
                    multiply(sum.v[n0 / 8 + h], a.high[s], high[2 * h], high[2 * h + 1]);
                }
            }
    }
    __device__ __forceinline__ void finish() {}
    __device__ __forceinline__ void finish_group() {}
    __device__ __forceinline__ void read(Fragment& f) { f = sums[0]; }
    template <int kSum = 0> __device__ __forceinline__ void read_group(Fragment& f) { f = sums[kSum]; }
    __device__ __forceinline__ void close() {}
};

#if defined(KITTENS_HOPPER) || defined(KITTENS_BLACKWELL)
template <int kRows> using Tile = kittens::st_bf<kRows, 64>;
template <typename T> __device__ __forceinline__ const T& tile_at(const uint8_t* p) { return *reinterpret_cast<const T*>(p); }
#endif

#if defined(KITTENS_HOPPER)
template <int kSums> struct Wgmma {
    using Sum = kittens::rt_fl<16, 64>;
    Sum sums[kSums];
    static constexpr bool kAsync = true, kStaged = false;
    __device__ __forceinline__ static int row_of_warp() { return threadIdx.x / 32 * 16; }
    __device__ Wgmma(uint64_t*, uint32_t*) {}
    // kittens' mma_fence also fences the asynchronous proxy, which waits for every load under way: the callers do that where
    // they have written operands to shared memory.
    __device__ __forceinline__ static void hold(Sum& sum) {                 // no move of the sum's registers past this point
#pragma unroll
        for (int i = 0; i < 16; ++i) asm volatile("" : "+f"(sum.tiles[0][i / 4].data[i % 4].x), "+f"(sum.tiles[0][i / 4].data[i % 4].y));
    }
    __device__ __forceinline__ static void fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
    __device__ __forceinline__ void begin(Sum& sum, bool clear) {
        if (clear) kittens::warp::zero(sum);
        hold(sum);
        fence();
    }
    template <Form kForm, bool kClear, int kSum = 0> __device__ __forceinline__ void one(const uint8_t* a, const uint8_t* b) {
        using T = Tile<64>;
        using Group = kittens::warpgroup;
        const T &A = tile_at<T>(a), &B = tile_at<T>(b);
        Sum& sum = sums[kSum];
        if constexpr (kForm == Form::kAtB) Group::template mma_AtB<Sum, T, T, 0, !kClear>(sum, A, B);
        else if constexpr (kForm == Form::kAB) Group::template mma_AB<Sum, T, T, 0, !kClear>(sum, A, B);
        else Group::template mma_ABt<Sum, T, T, 0, !kClear>(sum, A, B);
    }
    template <int kALow, int kBLow> __device__ __forceinline__ void start(const uint8_t* a, const uint8_t* b) {
        a += threadIdx.x / 128 * kTileBytes;
        begin(sums[0], true);
        one<Form::kAB, true>(a + kALow, b);
        one<Form::kAB, false>(a, b + kBLow);
        one<Form::kAB, false>(a, b);
    }
    template <Form kForm> __device__ __forceinline__ void start_exact(const uint8_t* a, const uint8_t* b) {
        begin(sums[0], true);
        products_of_parts(a, b, [&](auto clear, const uint8_t* a_part, const uint8_t* b_part) { one<kForm, clear.value>(a_part, b_part); });
    }
    template <Form kForm, int kSum = 0> __device__ __forceinline__ void start_pairs(const uint8_t* a, const uint8_t* b, bool clear) {
        begin(sums[kSum], clear);
        one<kForm, false, kSum>(a + kTileBytes, b);
        one<kForm, false, kSum>(a, b + kTileBytes);
        one<kForm, false, kSum>(a, b);
    }
    template <Form kForm, int kFirst, int kCount> __device__ __forceinline__ void start_registers(const Operand& a, const uint8_t* b, uint8_t*, bool clear) {
        using A = kittens::rt_bf<16, 64>;
        using B = Tile<64>;
        using Group = kittens::warpgroup;
        A high, low;
#pragma unroll
        for (int s = 0; s < 4; ++s)
#pragma unroll
            for (int r = 0; r < 4; ++r) {
                high.tiles[0][s].data[r] = reinterpret_cast<const __nv_bfloat162&>(a.high[s][r]);
                low.tiles[0][s].data[r] = reinterpret_cast<const __nv_bfloat162&>(a.low[s][r]);
            }
#pragma unroll
        for (int i = 0; i < kCount; ++i) {
            if (clear) kittens::warp::zero(sums[kFirst + i]);
            hold(sums[kFirst + i]);
        }
        fence();
#pragma unroll
        for (int i = 0; i < kCount; ++i) {
            Sum& sum = sums[kFirst + i];
            const B &b_high = tile_at<B>(b + i * kPairBytes), &b_low = tile_at<B>(b + i * kPairBytes + kTileBytes);
            if constexpr (kForm == Form::kAB) {
                Group::template mma_AB<Sum, A, B, 0, 1>(sum, low, b_high);
                Group::template mma_AB<Sum, A, B, 0, 1>(sum, high, b_low);
                Group::template mma_AB<Sum, A, B, 0, 1>(sum, high, b_high);
            } else {
                Group::template mma_ABt<Sum, A, B, 0, 1>(sum, low, b_high);
                Group::template mma_ABt<Sum, A, B, 0, 1>(sum, high, b_low);
                Group::template mma_ABt<Sum, A, B, 0, 1>(sum, high, b_high);
            }
        }
    }
    __device__ __forceinline__ void finish() { kittens::warpgroup::mma_async_wait<0>(); }
    __device__ __forceinline__ void finish_group() { kittens::warpgroup::mma_async_wait<0>(); }
    template <int kSum = 0> __device__ __forceinline__ void read_group(Fragment& f) {
        hold(sums[kSum]);
#pragma unroll
        for (int b = 0; b < 8; ++b)
#pragma unroll
            for (int half = 0; half < 2; ++half) f.v[b][half] = sums[kSum].tiles[0][b / 2].data[b % 2 * 2 + half];
    }
    __device__ __forceinline__ void read(Fragment& f) { read_group(f); }
    __device__ __forceinline__ void close() {}
};
#endif

#if defined(KITTENS_BLACKWELL)
// The accumulators live in tensor memory: 256 columns a block, or all 512 for three sums. Two warpgroups share 64 columns for their 64 rows each; a block's product
// has the place of the first two's, for they never run at once. The first thread of the block or of the warpgroup issues; a commit arrives
// on the barrier that the others wait for.
template <int kSums> struct Tcgen05 {
    using Sum = kittens::tt<float, 128, 64>;
    using GroupSum = kittens::tt<float, 64, 64>;
    kittens::tensor_allocator<kSums <= 2 ? 2 : 1, 1, false> memory;
    Sum sum;
    GroupSum group_sums[kSums];                                                 // lanes 0-15 or 16-31 of every quarter
    kittens::semaphore* done;                                               // [0]: the block's products; [1 + g]: warpgroup g's
    int products = 0, group_products = 0;                                   // waited for
    bool stage_is_read = false;                                             // by a product that was not waited for
    static constexpr bool kAsync = true, kStaged = true;
    __device__ __forceinline__ static int row_of_warp() { return 32 * (threadIdx.x / 32 % 4) + 16 * (threadIdx.x / 128); }
    __device__ Tcgen05(uint64_t* barriers, uint32_t* slot) : done(reinterpret_cast<kittens::semaphore*>(barriers)) {
        if (threadIdx.x == 0)
            for (int i = 0; i < 5; ++i) kittens::init_semaphore(done[i], 0, 1);
        if (threadIdx.x / 32 == 0) memory.provision(*slot);
        asm volatile("tcgen05.fence::before_thread_sync;" ::: "memory");
        __syncthreads();
        asm volatile("tcgen05.fence::after_thread_sync;" ::: "memory");
        memory.set_addr(*slot);
        sum = memory.template allocate<Sum>(0);
#pragma unroll
        for (int i = 0; i < kSums; ++i) group_sums[i] = memory.template allocate<GroupSum>(threadIdx.x / 128 % 2, 128 * i + threadIdx.x / 256 * 64);
    }
    template <int kALow, int kBLow> __device__ __forceinline__ void start(const uint8_t* a, const uint8_t* b) {
        if (threadIdx.x == 0) {
            asm volatile("tcgen05.fence::after_thread_sync;" ::: "memory");
            one<true>(a + kALow, b);
            one<false>(a, b + kBLow);
            one<false>(a, b);
            kittens::tensor_commit<1>(done[0]);
        }
    }
    template <Form kForm, bool kClear> __device__ __forceinline__ void one_group(GroupSum& group_sum, const uint8_t* a, const uint8_t* b) {
        kittens::mma<kForm == Form::kAtB, kForm == Form::kABt, GroupSum, Tile<64>, Tile<64>, !kClear>(group_sum, tile_at<Tile<64>>(a), tile_at<Tile<64>>(b));
    }
    template <Form kForm> __device__ __forceinline__ void pairs(GroupSum& group_sum, const uint8_t* a, const uint8_t* b, bool clear) {
        if (clear) one_group<kForm, true>(group_sum, a + kTileBytes, b);
        else one_group<kForm, false>(group_sum, a + kTileBytes, b);
        one_group<kForm, false>(group_sum, a, b + kTileBytes);
        one_group<kForm, false>(group_sum, a, b);
    }
    template <Form kForm> __device__ __forceinline__ void start_exact(const uint8_t* a, const uint8_t* b) {
        if (threadIdx.x % 128 == 0) {
            asm volatile("tcgen05.fence::after_thread_sync;" ::: "memory");
            products_of_parts(a, b, [&](auto clear, const uint8_t* a_part, const uint8_t* b_part) { one_group<kForm, clear.value>(group_sums[0], a_part, b_part); });
        }
    }
    template <Form kForm, int kSum = 0> __device__ __forceinline__ void start_pairs(const uint8_t* a, const uint8_t* b, bool clear) {
        if (threadIdx.x % 128 == 0) {
            asm volatile("tcgen05.fence::after_thread_sync;" ::: "memory");
            pairs<kForm>(group_sums[kSum], a, b, clear);
        }
    }
    template <Form kForm, int kFirst, int kCount> __device__ __forceinline__ void start_registers(const Operand& a, const uint8_t* b, uint8_t* stage, bool clear) {
        if (stage_is_read) finish_group();
        const int lane = threadIdx.x % 32, row = threadIdx.x % 128 / 32 * 16 + lane / 4;
#pragma unroll
        for (int s = 0; s < 4; ++s)
#pragma unroll
            for (int r = 0; r < 4; ++r) {
                uint8_t* const to = stage + tile_offset(row + r % 2 * 8, 16 * s + lane % 4 * 2 + r / 2 * 8);
                *reinterpret_cast<uint32_t*>(to) = a.high[s][r];
                *reinterpret_cast<uint32_t*>(to + kTileBytes) = a.low[s][r];
            }
        fence_async_proxy();
        asm volatile("tcgen05.fence::before_thread_sync;" ::: "memory");
        group_sync(threadIdx.x / 128);
        if (threadIdx.x % 128 == 0) {
            asm volatile("tcgen05.fence::after_thread_sync;" ::: "memory");
#pragma unroll
            for (int i = 0; i < kCount; ++i) pairs<kForm>(group_sums[kFirst + i], stage, b + i * kPairBytes, clear);
        }
        stage_is_read = true;
    }
    __device__ __forceinline__ void finish_group() {
        if (threadIdx.x % 128 == 0) kittens::tensor_commit<1>(done[1 + threadIdx.x / 128]);
        kittens::wait(done[1 + threadIdx.x / 128], group_products & 1);
        ++group_products;
        stage_is_read = false;
    }
    template <bool kClear> __device__ __forceinline__ void one(const uint8_t* a, const uint8_t* b) {
        kittens::mma<0, 0, Sum, Tile<128>, Tile<64>, !kClear>(sum, tile_at<Tile<128>>(a), tile_at<Tile<64>>(b));
    }
    __device__ __forceinline__ void finish() {
        kittens::wait(done[0], products & 1);
        ++products;
    }
    template <typename Load> __device__ __forceinline__ void fetch(Fragment& f, Load load) {
        asm volatile("tcgen05.fence::after_thread_sync;" ::: "memory");
        kittens::rt_fl<16, 64> t;
        load(t);
        kittens::tensor_load_wait();
        asm volatile("tcgen05.fence::before_thread_sync;" ::: "memory");
#pragma unroll
        for (int b = 0; b < 8; ++b)
#pragma unroll
            for (int half = 0; half < 2; ++half) f.v[b][half] = t.tiles[0][b / 2].data[b % 2 * 2 + half];
    }
    __device__ __forceinline__ void read(Fragment& f) {
        fetch(f, [&](auto& t) { kittens::group<8>::load_async(t, sum); });
    }
    template <int kSum = 0> __device__ __forceinline__ void read_group(Fragment& f) {
        fetch(f, [&](auto& t) { kittens::warpgroup::load_async(t, group_sums[kSum]); });
    }
    __device__ __forceinline__ void close() {
        __syncthreads();
        if (threadIdx.x / 32 == 0) memory.deprovision();
    }
};
#endif

// ---------------------------------------------------------------------------------------------------------------------
// geqr2 from the Gram matrix: one meeting per panel instead of one per column
// ---------------------------------------------------------------------------------------------------------------------
// With G = P^T P of the panel's 64 columns, R is the Cholesky factor of G with signs: row k is G_k / beta_k with
// beta_k = -sign(alpha_k) sqrt(G_kk). The reflectors V (unit lower trapezoidal) satisfy V U = P - [R; 0]: the top 64 x 64 part
// is an LU without pivoting, whose pivots alpha - beta never cancel, and below it V = P U^-1. T follows from the same small
// factors: X R = U, T V_top^T = -X. (Ballard, Demmel, Grigori, Jacquelin, Knight, Nguyen, "Reconstructing Householder vectors from
// tall-skinny QR", 2015.) tau is 2 / |v|^2 of the v that was stored, so that each reflector is orthogonal to rounding.
//
// Nearly dependent columns show as growth = max |(U^-1)_ij| |p_i|: the panel's residual is near 3 growth^2 eps. Past
// kGrowthLimit, or where (next to) nothing lies below a diagonal entry (LAPACK wants tau = 0 there), or where G left the
// safe range, the kernel leaves the panel as it is and sets redo for the column-by-column kernels. Exact for each matrix.
//
// Decomposition: the blocks of a cluster, 256 threads each, rows dealt in slabs of 128; every block runs the small recurrence
// for itself. Rows are read twice, once for G and once for V.
constexpr int kThreads = 256, kPitch = 68, kGramMatrixBytes = 4 * 64 * kPitch;   // 64 x 64 float32 matrices, rows 16-byte aligned
struct GramShared {                                                         // byte offsets; 64 x 64 matrices, then small things
    static constexpr int kMatrix = kGramMatrixBytes;
    static constexpr int kU = 0;                                            // above the block diagonal U, below T^T; before and after, with the
    static constexpr int kInverse = 2 * kMatrix;                            //   next 64 x 64, tiles of P. G summed over the cluster; U^-1 (high, low)
    static constexpr int kStep = 3 * kMatrix;                               // inputs of gram_factor's next step: columns of G and P, a row of P;
    static constexpr int kDiagonal = kStep + 3 * 4 * 4 * 64;                //   the diagonal blocks of -R and V, packed
    static constexpr int kR = 4 * kMatrix;                                  // G; then above the block diagonal -R, below -X^T
    static constexpr int kVt = 5 * kMatrix;                                 // above the block diagonal V_top^T, below U^-T
    static constexpr int kSquares = 6 * kMatrix;                            // per warp: sums of squares of V's columns
    static constexpr int kNorm = kSquares + 4 * 8 * 64;                     // |p_i|
    static constexpr int kMail = kNorm + 4 * 64;                            // per rank: sums of squares of V's columns
    static constexpr int kBytes = kMail + 4 * kMaxCluster * 64;
    static_assert(kMatrix % 1024 == 0, "swizzled tiles start on 1024 bytes");
    static_assert(2 * kTripleBytes <= 3 * kMatrix && 2 * kPairBytes <= 2 * kMatrix && kPairBytes <= kMatrix && kDiagonal + 4 * 4 * 64 <= kR);
};
// R, V_top, U^-1 and T from G and P_top, four columns at a time. A thread keeps the 4 x 4 tiles (tile_row, tile_column) of both in registers.
// Step s, blocks i below s and j right of it:
//   G_ss = R_ss^T R_ss (with signs), P_ss - R_ss = V_ss U_ss      by every thread of the first two warps, for itself
//   R_sj = R_ss^-T G_sj, U_sj = V_ss^-1 (P_sj - R_sj), V_is = P_is U_ss^-1      thread c of those: column c and row c, to shared memory
//   G_ij -= R_si^T R_sj, P_ij -= V_is U_sj                       a tile per thread
// The tiles that are finished take part in the same three lines, as rows and columns of an augmented matrix:
//   above the diagonal P_ij becomes (U^-1)_ij: starts from zero in block row i = s, next to the identity, and is solved as V_is is;
//                      G_ij becomes X_ij, X R = U: starts from zero there, next to U_ss, U_sj is added where it is solved, as R_sj is;
//   below it           P_ij becomes (T^T)_ij, V_top T^T = -X^T: starts from zero in block column j = s and is solved as U_sj is.
// G is symmetric: its lower triangle is what R comes from. Shared memory has -R and -X^T, which saves negations.
// What the next step needs goes to shared memory, tiles of G and P in block column s and of P in block row s. Meanwhile other warps split
// the last step's columns of U^-1 and T. t_pair: T (high, low), or null. False: a guard failed. Whole block; no barrier at the end.
__device__ __forceinline__ int tile_row() { return threadIdx.x / 32 % 4 * 4 + threadIdx.x % 32 / 8; }   // a warp has 4 x 8 tiles
__device__ __forceinline__ int tile_column() { return threadIdx.x / 128 * 8 + threadIdx.x % 8; }
__device__ __forceinline__ void store_tile_row(float* to, const float (&x)[4]) { *reinterpret_cast<float4*>(to) = make_float4(x[0], x[1], x[2], x[3]); }
__device__ __forceinline__ void subtract_product(float (&C)[4][4], const float (&a)[4], const float (&b)[4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i)
#pragma unroll
        for (int j = 0; j < 4; ++j) C[i][j] = fmaf(-a[i], b[j], C[i][j]);
}
__device__ __forceinline__ bool gram_factor(float (&G)[4][4], float (&P)[4][4], uint8_t* shared, uint8_t* t_pair) {
    using S = GramShared;
    float* const sU = reinterpret_cast<float*>(shared + S::kU);
    float* const sR = reinterpret_cast<float*>(shared + S::kR);
    float* const sVt = reinterpret_cast<float*>(shared + S::kVt);
    float* const g_column = reinterpret_cast<float*>(shared + S::kStep);    // 64 x 4
    float* const p_column = g_column + 4 * 64;                              // 64 x 4
    float* const p_row = p_column + 4 * 64;                                 // 4 x 64
    float* const diagonal = reinterpret_cast<float*>(shared + S::kDiagonal);
    const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0);
    int row = tile_row(), column = tile_column(), c = threadIdx.x % 64;
    asm volatile("" : "+r"(row), "+r"(column), "+r"(c));                    // kept, not computed in every step
    const auto publish = [&](int s) {
        if (warp / 4 != s / 8 && warp % 4 != s / 4) return;
        if (column == s)
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                store_tile_row(g_column + 16 * row + 4 * i, G[i]);
                store_tile_row(p_column + 16 * row + 4 * i, P[i]);
            }
        if (row == s)
#pragma unroll
            for (int i = 0; i < 4; ++i) store_tile_row(p_row + 64 * i + 4 * column, P[i]);
#pragma unroll
        for (int i = 0; i < 4; ++i)
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                G[i][j] = row == s ? 0.0f : G[i][j];
                P[i][j] = row == s || column == s ? 0.0f : P[i][j];
            }
    };
    bool good = true;
    publish(0);
    __syncthreads();
#pragma unroll 1
    for (int s = 0; ; ++s) {
        const int t = 4 * s;
        if (warp < 2 && s < 16) {
            // To begin with G_ss, P_ss, row c of G, column c and row c of P; in the end -R_ss, U_ss and V_ss, -R or -X^T, U or T^T, V or U^-1.
            float g[4][4], p[4][4], x[4] = {}, y[4] = {}, z[4], e[4];
#pragma unroll
            for (int k = 0; k < 4; ++k) z[k] = e[k] = c == t + k;
#pragma unroll
            for (int k = 0; k < 4; ++k) {
                load_four(g[k], g_column + 4 * t + 4 * k);
                load_four(p[k], p_column + 4 * t + 4 * k);
            }
            if (c < t || c >= t + 4) {
                load_four(x, g_column + 4 * c);
                load_four(z, p_column + 4 * c);
#pragma unroll
                for (int k = 0; k < 4; ++k) y[k] = p_row[64 * k + c];
            }
            float u[4] = {};
            if (c < t) load_four(u, sU + c * kPitch + t);
#pragma unroll
            for (int k = 0; k < 4; ++k) {
                const GramStep h = gram_step(g[k][k], p[k][k], good);
#pragma unroll
                for (int j = k; j < 4; ++j) g[k][j] *= h.minus_inv_beta;
                p[k][k] = h.pivot;
#pragma unroll
                for (int j = k + 1; j < 4; ++j) p[k][j] += g[k][j];
                x[k] += u[k];
#pragma unroll
                for (int i = 0; i <= k; ++i) x[k] = fmaf(e[i], p[i][k], x[k]);   // U_ss
                x[k] *= h.minus_inv_beta;
                y[k] += x[k];
                z[k] *= h.inv;
#pragma unroll
                for (int i = k + 1; i < 4; ++i) {
                    p[i][k] *= h.inv;
#pragma unroll
                    for (int j = i; j < 4; ++j) g[i][j] = fmaf(-g[k][i], g[k][j], g[i][j]);
#pragma unroll
                    for (int j = k + 1; j < 4; ++j) p[i][j] = fmaf(-p[i][k], p[k][j], p[i][j]);
                    x[i] = fmaf(-g[k][i], x[k], x[i]);
                    y[i] = fmaf(-p[i][k], y[k], y[i]);
                    z[i] = fmaf(-z[k], p[k][i], z[i]);
                }
                sR[(t + k) * kPitch + c] = x[k];
                sU[(t + k) * kPitch + c] = y[k];
                sVt[(t + k) * kPitch + c] = z[k];
            }
            if (c == 0)
#pragma unroll
                for (int k = 0; k < 4; ++k)
                    *reinterpret_cast<float4*>(diagonal + 4 * t + 4 * k)
                        = make_float4(k > 0 ? p[k][0] : g[k][0], k > 1 ? p[k][1] : g[k][1], k > 2 ? p[k][2] : g[k][2], g[k][3]);
        } else if (warp % 4 >= 2 && s > 0) {
            const int t0 = t - 4;
            const bool inverse = warp < 4;                                  // U^-1, and its growth; or T
            const float* const from = (inverse ? sVt : sU) + t0 * kPitch + c;
            float y[4];
#pragma unroll
            for (int k = 0; k < 4; ++k) y[k] = c < t ? from[k * kPitch] : 0.0f;
            uint2 high, low;
            split_bf16(y[0], y[1], high.x, low.x);
            split_bf16(y[2], y[3], high.y, low.y);
            if (inverse) {
                // Columns change places so that V's fragments hold four neighbouring columns of V: the product's column 8 b + 2 t + e is V's
                // column 16 (b / 2) + 4 t + 2 (b % 2) + e.
                uint8_t* const to = shared + S::kInverse;
                const int left = (t0 & ~15) + (t0 & 15) / 2;
                *reinterpret_cast<uint32_t*>(to + tile_offset(c, left)) = high.x;
                *reinterpret_cast<uint32_t*>(to + tile_offset(c, left + 8)) = high.y;
                *reinterpret_cast<uint32_t*>(to + kTileBytes + tile_offset(c, left)) = low.x;
                *reinterpret_cast<uint32_t*>(to + kTileBytes + tile_offset(c, left + 8)) = low.y;
                const float norm = reinterpret_cast<const float*>(shared + S::kNorm)[c];
#pragma unroll
                for (int k = 0; k < 4; ++k) good &= fabsf(y[k]) * norm < kGrowthLimit;
            } else if (t_pair) {
                uint8_t* const to = t_pair + tile_offset(c, t0);
                *reinterpret_cast<uint2*>(to) = high;
                *reinterpret_cast<uint2*>(to + kTileBytes) = low;
            }
        }
        if (s == 16) return good;
        __syncthreads();
        if (s == 15) continue;
        const float *const at_row = sR + t * kPitch + 4 * row, *const at_column = sR + t * kPitch + 4 * column;
        float v[4], u[4], left[4], right[4];
        if (s < 7 || warp >= 4) {                                           // P and G
#pragma unroll
            for (int k = 0; k < 4; ++k) {
                load_four(v, at_row + (sVt - sR) + k * kPitch);
                load_four(u, at_column + (sU - sR) + k * kPitch);
                load_four(left, at_row + k * kPitch);
                load_four(right, at_column + k * kPitch);
                subtract_product(P, v, u);
                subtract_product(G, left, right);
            }
        } else if (4 * warp + 3 > s) {                                      // the left half of G is finished, and P's upper part of it
#pragma unroll
            for (int k = 0; k < 4; ++k) {
                load_four(v, at_row + (sVt - sR) + k * kPitch);
                load_four(u, at_column + (sU - sR) + k * kPitch);
                subtract_product(P, v, u);
            }
        }
        publish(s + 1);
        __syncthreads();
    }
}

// What the blocks of a cluster tell each other. Barriers: shares of a sum, the sum, squares.
struct PanelCluster {
    static constexpr int kBarriers = 3;
    uint64_t* arrived;
    float* inbox;          // 16 KiB, free whenever a block of the cluster may have come to sum_fragments
    uint32_t rank, ranks;
    int sums = 0, squares = 0;
    __device__ __forceinline__ PanelCluster(uint64_t* barriers, float* inbox) : arrived(barriers), inbox(inbox), rank(0), ranks(1) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
        asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
        asm("mov.u32 %0, %%cluster_nctarank;" : "=r"(ranks));
#endif
    }
    __device__ __forceinline__ void open() {                                // whole block, once
        if (ranks == 1) return;
        if (threadIdx.x == 0)
            for (int i = 0; i < kBarriers; ++i) barrier_init(arrived + i, 1);
        cluster_arrive();                                                   // sum_fragments waits: they are there
    }
};

// The two warpgroups' fragments of a 64 x 64 matrix added up, in order, in `own`, and these over the ranks, in order, in `total`; with one
// rank `own` is the result. Returns the result. Each rank adds up its share of the rows and gives it to all. Whole block; `own` must be free, `total`
// too once every rank has come here. Ends with a barrier.
__device__ __forceinline__ const float* sum_fragments(const float2 (&sum)[8][2], float* own, float* total, PanelCluster& cluster) {
    const int tid = threadIdx.x, lane = tid % 32, row = tid / 32 % 4 * 16 + lane / 4;
    const int rank = cluster.rank, ranks = cluster.ranks, share = 64 / ranks;   // rows
    if (ranks > 1 && tid == 0)
        for (int i = 0; i < 2; ++i) barrier_expect(cluster.arrived + i, 64 * 64 * 4);
    for (int g = 0; g < 2; ++g) {
        if (g == tid / 128)
#pragma unroll
            for (int b = 0; b < 8; ++b)
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    float2* const to = reinterpret_cast<float2*>(own + (row + 8 * half) * kPitch + 8 * b + lane % 4 * 2);
                    const float2 old = g ? *to : make_float2(0, 0);
                    *to = make_float2(old.x + sum[b][half].x, old.y + sum[b][half].y);
                }
        __syncthreads();
    }
    if (ranks == 1) return own;
    if (cluster.sums == 0) cluster_wait();
    const int parity = cluster.sums++ & 1;
#pragma unroll
    for (int e = tid; e < 1024; e += kThreads) {
        const int i = e / 16, c = e % 16 * 4;
        push_four(cluster.inbox + (rank * share + i % share) * 64 + c, cluster.arrived, i / share, *reinterpret_cast<const float4*>(own + i * kPitch + c));
    }
    barrier_wait(cluster.arrived, parity);
    const int each = min(kThreads, 16 * share);                             // threads that add up; others give it to other ranks
#pragma unroll 1
    for (int e = tid % each; e < 16 * share; e += each) {
        float4 t = make_float4(0, 0, 0, 0);
#pragma unroll 4
        for (int q = 0; q < ranks; ++q) {
            const float4 y = *reinterpret_cast<const float4*>(cluster.inbox + q * share * 64 + 4 * e);
            t = make_float4(t.x + y.x, t.y + y.y, t.z + y.z, t.w + y.w);
        }
#pragma unroll 1
        for (int q = tid / each; q < ranks; q += kThreads / each) push_four(total + (rank * share + e / 16) * kPitch + e % 16 * 4, cluster.arrived + 1, q, t);
    }
    barrier_wait(cluster.arrived + 1, parity);
    __syncthreads();
    return total;
}

// False: declined, and the panel is as it was.
template <bool kAligned, class Product>
__device__ __forceinline__ bool gram_panel(const PanelArgs& p, Product& product, PanelCluster& cluster, uint8_t* shared, long matrix) {
    using S = GramShared;
    const uint32_t rank = cluster.rank, ranks = cluster.ranks;
    const auto matrix_at = [&](int offset) { return reinterpret_cast<float*>(shared + offset); };
    const float* const sR = matrix_at(S::kR);
    const float* const sVt = matrix_at(S::kVt);
    const float* const diagonal = matrix_at(S::kDiagonal);
    float* const s_norm = matrix_at(S::kNorm);
    float* const mail = matrix_at(S::kMail);
    const int tid = threadIdx.x, lane = tid % 32, warp = tid / 32, group = tid / 128, in_group = tid % 128;
    const int m = p.n - p.col, slabs = (m + 127) / 128, slab0 = slabs * rank / ranks, slab1 = slabs * (rank + 1) / ranks;
    const float* const src = p.src + (matrix * p.n + p.col) * p.n + p.col;
    float* const dst = p.dst + (matrix * p.n + p.col) * p.n + p.col;

    // A warpgroup's 64 rows of a slab: a thread has 4 neighbouring columns of 8 rows.
    const int c4 = in_group % 16 * 4, c_row = in_group / 16;
    float4 x[8];
    auto fetch = [&](int slab) {
        const int row = 128 * slab + 64 * group + c_row;
        const float* at = src + (static_cast<long>(row) * p.n + c4);
#pragma unroll
        for (int i = 0; i < 8; ++i, at += 8l * p.n) {
            x[i] = make_float4(0, 0, 0, 0);
            if (row + 8 * i < m) x[i] = kAligned ? *reinterpret_cast<const float4*>(at) : make_float4(at[0], at[1], at[2], at[3]);
        }
    };
    fetch(slab0);

    // G = P^T P. Each slab's products are summed on tensor cores, the slabs in float32 here.
    Fragment f;
    float2 sum[8][2] = {};
    for (int slab = slab0; slab < slab1; ++slab) {
        uint8_t* const tile = shared + group * kTripleBytes;
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            const int at = tile_offset(c_row + 8 * i, c4);
            float4 rest = x[i];
#pragma unroll
            for (int t = 0; t < 3; ++t) *reinterpret_cast<uint2*>(tile + t * kTileBytes + at) = make_uint2(take_bf16(rest.x, rest.y), take_bf16(rest.z, rest.w));
        }
        fence_async_proxy();
        group_sync(group);
        product.template start_exact<Form::kAtB>(tile, tile);
        if (Product::kAsync && slab + 1 < slab1) fetch(slab + 1);
        product.finish_group();
        product.read_group(f);
#pragma unroll
        for (int b = 0; b < 8; ++b)
#pragma unroll
            for (int half = 0; half < 2; ++half) { sum[b][half].x += f.v[b][half].x; sum[b][half].y += f.v[b][half].y; }
        if (!Product::kAsync && slab + 1 < slab1) fetch(slab + 1);
        group_sync(group);
    }
    __syncthreads();
    const int my_row = Product::row_of_warp() + lane / 4;
    const float* const gram = sum_fragments(sum, matrix_at(S::kR), matrix_at(S::kInverse), cluster);
    if (tid < 64) s_norm[tid] = sqrtf(gram[tid * kPitch + tid]);
    float G[4][4], P[4][4];
    {
        const int row = 4 * tile_row(), column = 4 * tile_column();
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const float* const from = src + static_cast<long>(row + i) * p.n + column;
            if (kAligned) load_four(P[i], from);
            else { P[i][0] = from[0]; P[i][1] = from[1]; P[i][2] = from[2]; P[i][3] = from[3]; }
            load_four(G[i], gram + (row + i) * kPitch + column);
        }
    }
    // The same in all threads, which the compiler knows of a shuffle.
    const bool redo = __shfl_sync(0xffffffffu, __syncthreads_or(!gram_factor(G, P, shared, rank == 0 ? p.t + matrix * kPairBytes : nullptr)), 0);
    if (rank == 0 && tid == 0) p.redo[matrix] = redo;
    if (redo) return false;

    // V = P U^-1, 128 rows at a time; the first 64 rows are R and V_top.
    uint8_t* const sA = shared;
    float squares[4][4] = {};
    fetch(slab0);
    for (int slab = slab0; slab < slab1; ++slab) {
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            uint2 high, low;
            split_bf16(x[i].x, x[i].y, high.x, low.x);
            split_bf16(x[i].z, x[i].w, high.y, low.y);
            const int at = group * kTileBytes + tile_offset(c_row + 8 * i, c4);
            *reinterpret_cast<uint2*>(sA + at) = high;
            *reinterpret_cast<uint2*>(sA + 2 * kTileBytes + at) = low;
        }
        fence_async_proxy();
        __syncthreads();
        product.template start<2 * kTileBytes, kTileBytes>(sA, shared + S::kInverse);
        if (Product::kAsync && slab + 1 < slab1) fetch(slab + 1);
        product.finish();
        product.read(f);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int row = 128 * slab + my_row + 8 * half;
            float* const to = dst + static_cast<long>(row) * p.n;
            uint8_t* const tile = p.v_tiles + (matrix * p.row_blocks + row / 64) * kPairBytes;
            const bool has_tile = row / 64 < p.row_blocks;
#pragma unroll
            for (int q = 0; q < 4; ++q) {
                const int column = 16 * q + lane % 4 * 4;
                float4 v = make_float4(f.v[2 * q][half].x, f.v[2 * q][half].y, f.v[2 * q + 1][half].x, f.v[2 * q + 1][half].y), h = v;
                if (row < 64) {
                    const int d = row - column;                             // below a multiple of 4: the tile of H is V's, above R's
                    if (d >= 4) {
                        const float* const vt = sVt + column * kPitch + row;
                        h = v = make_float4(vt[0], vt[kPitch], vt[2 * kPitch], vt[3 * kPitch]);
                    } else {
                        const float4 r = *reinterpret_cast<const float4*>(d < 0 ? sR + row * kPitch + column : diagonal + 4 * row);
                        h = make_float4(d > 0 ? r.x : -r.x, d > 1 ? r.y : -r.y, d > 2 ? r.z : -r.z, -r.w);
                        v = make_float4(d > 0 ? r.x : d == 0, d > 1 ? r.y : d == 1, d > 2 ? r.z : d == 2, d == 3);
                    }
                }
                if (row < m) {
                    if (kAligned) *reinterpret_cast<float4*>(to + column) = h;
                    else { to[column] = h.x; to[column + 1] = h.y; to[column + 2] = h.z; to[column + 3] = h.w; }
                }
                squares[q][0] = fmaf(v.x, v.x, squares[q][0]);              // the unit diagonal included
                squares[q][1] = fmaf(v.y, v.y, squares[q][1]);
                squares[q][2] = fmaf(v.z, v.z, squares[q][2]);
                squares[q][3] = fmaf(v.w, v.w, squares[q][3]);
                uint2 high, low;
                split_bf16(v.x, v.y, high.x, low.x);
                split_bf16(v.z, v.w, high.y, low.y);
                if (has_tile) {                                             // four lanes fill a sector
                    *reinterpret_cast<uint2*>(tile + tile_offset(row % 64, column)) = high;
                    *reinterpret_cast<uint2*>(tile + kTileBytes + tile_offset(row % 64, column)) = low;
                }
            }
        }
        if (!Product::kAsync && slab + 1 < slab1) fetch(slab + 1);
        __syncthreads();
    }

    // tau = 2 / |v|^2: over a warp's rows, the warps, the ranks, in that order
    float* const s_squares = reinterpret_cast<float*>(shared + S::kSquares);
#pragma unroll
    for (int q = 0; q < 4; ++q)
#pragma unroll
        for (int e = 0; e < 4; ++e) {
#pragma unroll
            for (int o = 4; o < 32; o *= 2) squares[q][e] += __shfl_xor_sync(0xffffffffu, squares[q][e], o);
            if (lane < 4) s_squares[warp * 64 + 16 * q + 4 * lane + e] = squares[q][e];
        }
    if (ranks > 1 && rank == 0 && tid == 0) barrier_expect(cluster.arrived + 2, ranks * 64 * 4);
    __syncthreads();
    if (tid < 16) {
        float4 total = make_float4(0, 0, 0, 0);
        for (int q = 0; q < 8; ++q) {
            const float4 y = *reinterpret_cast<const float4*>(s_squares + q * 64 + 4 * tid);
            total = make_float4(total.x + y.x, total.y + y.y, total.z + y.z, total.w + y.w);
        }
        float* const to = mail + rank * 64 + 4 * tid;
        if (ranks > 1) push_four(to, cluster.arrived + 2, 0, total);
        else *reinterpret_cast<float4*>(to) = total;
    }
    if (ranks == 1) __syncthreads();
    else if (rank == 0) barrier_wait(cluster.arrived + 2, cluster.squares & 1);
    ++cluster.squares;
    if (rank == 0 && tid < 64) {
        float total = 0;
        for (uint32_t q = 0; q < ranks; ++q) total += mail[q * 64 + tid];
        p.tau[matrix * p.n + p.col + tid] = 2.0f / total;
    }
    return true;
}

// ---------------------------------------------------------------------------------------------------------------------
// A panel or a pair: for the second, the update by the first; the Gram factorization
// ---------------------------------------------------------------------------------------------------------------------
// The second panel of a pair is updated here, by the same blocks that factor it, tile after tile of 64 rows, each warpgroup its own:
//   W = V^T C over all tiles, summed over warpgroups and ranks;   Y = T^T W;   C -= V Y
// Rows are the ones each rank has as a panel, and the 64 rows above them, R's, which the first rank's second warpgroup takes.
struct PanelUpdate {
    const float* src;      // C and V start at row and column `col`; the panel is 64 columns right of it
    float* dst;
    const uint8_t* v_tiles;        // null: nothing to update
    const uint8_t* t;
    int col, row_blocks;
};
struct PanelUpdateShared {                                                  // byte offsets
    static constexpr int kV = 0;                                            // per warpgroup two pairs; W's two sums between
    static constexpr int kC = 4 * kPairBytes;                               // per warpgroup a pair of C; then T, and W and Y in its turn
    static constexpr int kBytes = kC + 2 * kPairBytes;
    static_assert(2 * kGramMatrixBytes <= kC);
};

template <bool kAligned, class Product>
__device__ __forceinline__ void update_panel(const PanelUpdate& p, int n, Product& product, PanelCluster& cluster, uint8_t* shared, uint64_t* barriers, long matrix) {
    using S = PanelUpdateShared;
    const uint32_t rank = cluster.rank, ranks = cluster.ranks;
    const int tid = threadIdx.x, lane = tid % 32, warp = __shfl_sync(0xffffffffu, tid / 32, 0), group = warp / 4, in_group = tid % 128;
    uint8_t* const v_slots = shared + S::kV + group * 2 * kPairBytes;
    uint8_t* const c_pair = shared + S::kC + group * kPairBytes;
    uint64_t* const full = barriers + 2 * group;
    uint64_t* const t_full = barriers + 4;
    if (tid == 0) {
        for (int i = 0; i < 5; ++i) barrier_init(barriers + i, kPairArrivals);
        fence_async_proxy();
    }
    __syncthreads();
    const int slabs = p.row_blocks / 2, slab0 = slabs * rank / ranks, slab1 = slabs * (rank + 1) / ranks;   // of 128 rows, below the first 64
    const int extra = rank == 0 && group == 1;
    const int count = extra + slab1 - slab0 - (group == 1 && slab1 == slabs && p.row_blocks % 2 == 0 && slab1 > slab0);
    const auto tile_at = [&](int e) { return e < extra ? 0 : 2 * (slab0 + e - extra) + group + 1; };
    const uint8_t* const v_tiles = p.v_tiles + matrix * p.row_blocks * kPairBytes;
    // Fill number i of the warpgroup's slots goes to slot i % 2: first the tiles once for W, then once more for C.
    const auto load_v = [&](int fill) {
        const int e = fill < count ? fill : fill - count;
        load_pair(v_slots + fill % 2 * kPairBytes, v_tiles + static_cast<long>(tile_at(e)) * kPairBytes, full + fill % 2);
    };
    const auto wait_v = [&](int fill) { barrier_wait(full + fill % 2, fill / 2 & 1); };
    const long origin = (matrix * n + p.col) * n + p.col + kPanelWidth;
    const int m = n - p.col;
    const int c4 = in_group % 16 * 4, c_row = in_group / 16;
    float4 x[8];
    const auto fetch = [&](int e) {
        const int row = 64 * tile_at(e) + c_row;
        const float* at = p.src + origin + static_cast<long>(row) * n + c4;
#pragma unroll
        for (int i = 0; i < 8; ++i, at += 8l * n) {
            x[i] = make_float4(0, 0, 0, 0);
            if (e < count && row + 8 * i < m) x[i] = kAligned ? *reinterpret_cast<const float4*>(at) : make_float4(at[0], at[1], at[2], at[3]);
        }
    };
    if (warp % 4 == 0)
        for (int e = 0; e < min(count, 2); ++e) load_v(e);
    fetch(0);
#pragma unroll 1
    for (int e = 0; e < count; ++e) {
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            uint2 high, low;
            split_bf16(x[i].x, x[i].y, high.x, low.x);
            split_bf16(x[i].z, x[i].w, high.y, low.y);
            const int at = tile_offset(c_row + 8 * i, c4);
            *reinterpret_cast<uint2*>(c_pair + at) = high;
            *reinterpret_cast<uint2*>(c_pair + kTileBytes + at) = low;
        }
        fence_async_proxy();
        group_sync(group);
        wait_v(e);
        product.template start_pairs<Form::kAtB>(v_slots + e % 2 * kPairBytes, c_pair, e == 0);
        if (Product::kAsync) fetch(e + 1);
        product.finish_group();
        if (!Product::kAsync) fetch(e + 1);
        group_sync(group);
        if (warp % 4 == 0 && e + 2 < count) load_v(e + 2);
    }
    Fragment f;
    product.read_group(f);
    if (count == 0)
#pragma unroll
        for (int i = 0; i < 16; ++i) f.v[i / 2][i % 2] = make_float2(0, 0);
    __syncthreads();
    if (warp == 0) load_pair(shared + S::kC, p.t + matrix * kPairBytes, t_full);
    const float* const w = sum_fragments(f.v, reinterpret_cast<float*>(shared), reinterpret_cast<float*>(shared + kGramMatrixBytes), cluster);
    uint8_t* const y_pair = shared + S::kC + kPairBytes;
#pragma unroll
    for (int e = 0; e < 4; ++e) {                                           // W in two parts
        const int i = tid / 16 + 16 * e, j = tid % 16 * 4;
        const float4 y = *reinterpret_cast<const float4*>(w + i * kPitch + j);
        uint2 high, low;
        split_bf16(y.x, y.y, high.x, low.x);
        split_bf16(y.z, y.w, high.y, low.y);
        *reinterpret_cast<uint2*>(y_pair + tile_offset(i, j)) = high;
        *reinterpret_cast<uint2*>(y_pair + kTileBytes + tile_offset(i, j)) = low;
    }
    fence_async_proxy();
    __syncthreads();
    if (warp % 4 == 0)
        for (int e = 0; e < min(count, 2); ++e) load_v(count + e);
    if (group == 0) {
        barrier_wait(t_full, 0);
        product.template start_pairs<Form::kAtB>(shared + S::kC, y_pair, true);
        product.finish_group();
        product.read_group(f);
        group_sync(group);                                                  // W is read: Y takes its place
#pragma unroll
        for (int half = 0; half < 2; ++half)
#pragma unroll
            for (int b = 0; b < 8; ++b) {
                uint32_t high, low;
                split_bf16(f.v[b][half].x, f.v[b][half].y, high, low);
                uint8_t* const to = y_pair + tile_offset(warp * 16 + lane / 4 + 8 * half, 8 * b + lane % 4 * 2);
                *reinterpret_cast<uint32_t*>(to) = high;
                *reinterpret_cast<uint32_t*>(to + kTileBytes) = low;
            }
        fence_async_proxy();
    }
    __syncthreads();
#pragma unroll 1
    for (int e = 0; e < count; ++e) {
        const int row = 64 * tile_at(e) + warp % 4 * 16 + lane / 4;
        const long at = origin + static_cast<long>(row) * n + lane % 4 * 2;
        wait_v(count + e);
        product.template start_pairs<Form::kAB>(v_slots + (count + e) % 2 * kPairBytes, y_pair, true);
        float2 c[8][2];
#pragma unroll
        for (int half = 0; half < 2; ++half)
#pragma unroll
            for (int b = 0; b < 8; ++b) {
                const float* const from = p.src + at + 8l * half * n + 8 * b;
                c[b][half] = make_float2(0, 0);
                if (row + 8 * half < m) c[b][half] = kAligned ? *reinterpret_cast<const float2*>(from) : make_float2(from[0], from[1]);
            }
        product.finish_group();
        product.read_group(f);
        group_sync(group);
        if (warp % 4 == 0 && e + 2 < count) load_v(count + e + 2);
#pragma unroll
        for (int half = 0; half < 2; ++half)
#pragma unroll
            for (int b = 0; b < 8; ++b)
                if (row + 8 * half < m) {
                    float* const to = p.dst + at + 8l * half * n + 8 * b;
                    const float2 y = make_float2(c[b][half].x - f.v[b][half].x, c[b][half].y - f.v[b][half].y);
                    if (kAligned) *reinterpret_cast<float2*>(to) = y;
                    else { to[0] = y.x; to[1] = y.y; }
                }
    }
    if (ranks > 1) cluster_sync();                                          // every rank reads the panel's first rows
    else __syncthreads();
}

struct PanelShared {                                                        // byte offsets
    static constexpr int kInbox = PanelUpdateShared::kBytes;                // what gram_panel has there is in use only between its sums
    static constexpr int kBarriers = std::max(kInbox + 64 * 64 * 4, GramShared::kBytes);
    static constexpr int kBytes = kBarriers + 128;
    static_assert(kInbox >= GramShared::kVt && 2 * (kBytes + 1024) <= 228 << 10, "two blocks on a multiprocessor");
};
// todo: per matrix, whether there is anything to do; null: for all. kBlocks: of them on a multiprocessor. Two hide each other's waiting,
// one has the registers it wants.
template <class Product, bool kAligned, int kBlocks>
__global__ void __launch_bounds__(kThreads, kBlocks) panel_kernel(const PanelUpdate update, const PanelArgs p, const int* todo) {
    extern __shared__ __align__(1024) uint8_t shared[];
    allow_next_kernel();
    uint64_t* const barriers = reinterpret_cast<uint64_t*>(shared + PanelShared::kBarriers);
    PanelCluster cluster(barriers + 12, reinterpret_cast<float*>(shared + PanelShared::kInbox));
    const long matrix = blockIdx.x / cluster.ranks;
    if (todo && !todo[matrix]) return;
    cluster.open();
    Product product(barriers, reinterpret_cast<uint32_t*>(barriers + 6));
    if (update.v_tiles) update_panel<kAligned>(update, p.n, product, cluster, shared, barriers + 7, matrix);
    if (p.redo) gram_panel<kAligned>(p, product, cluster, shared, matrix);
    product.close();
}

// Both panels of a pair. Where the first is declined the second is left to a panel kernel, with the first's `redo` as its `todo`.
struct PanelPair { PanelArgs panel[2]; PanelUpdate update; };
template <class Product, bool kAligned>
__global__ void __launch_bounds__(kThreads, 1) pair_kernel(const __grid_constant__ PanelPair pair) {
    extern __shared__ __align__(1024) uint8_t shared[];
    allow_next_kernel();
    uint64_t* const barriers = reinterpret_cast<uint64_t*>(shared + PanelShared::kBarriers);
    PanelCluster cluster(barriers + 12, reinterpret_cast<float*>(shared + PanelShared::kInbox));
    const long matrix = blockIdx.x / cluster.ranks;
    cluster.open();
    Product product(barriers, reinterpret_cast<uint32_t*>(barriers + 6));
#pragma unroll 1
    for (int i = 0; i < 2; ++i) {
        if (i) {                                                            // V and T of the first are in memory, and come back by copies
            fence_async_proxy_global();
            fence_async_proxy();
            if (cluster.ranks > 1) cluster_sync();
            else __syncthreads();
            update_panel<kAligned>(pair.update, pair.panel[0].n, product, cluster, shared, barriers + 7, matrix);
        }
        const PanelArgs p = i ? pair.panel[1] : pair.panel[0];              // chosen, not indexed: pointers known to be global
        if (!gram_panel<kAligned>(p, product, cluster, shared, matrix)) {
            if (!i && cluster.rank == 0 && threadIdx.x == 0) pair.panel[1].redo[matrix] = 0;
            break;
        }
    }
    product.close();
}

// ---------------------------------------------------------------------------------------------------------------------
// larfb: C -= V T^T (V^T C) on the trailing columns, V of one panel or of a pair
// ---------------------------------------------------------------------------------------------------------------------
// A unit is 64 columns of C, all rows, and belongs to a warpgroup, which works on it alone; the warpgroups of a block
// share V and T in shared memory. The roles of rows and columns are swapped, so that C is the products' left operand, from registers:
//   1. W^T = C^T V     tile after tile of 64 rows, C split in registers
//   2. Y^T = W^T T     W^T becomes the left operand where it lies
//   3. C^T -= Y^T V^T  tiles in reverse order: the last two are still in shared memory, those before in L2
// A pair's T is never formed: with S = V1^T V2, Y1^T = W1^T T1 and Y2^T = (W2^T - Y1^T S) T2. The block makes S in its first round, while V's
// tiles are there anyway, each warpgroup from its share of them.
// A thread's columns: two neighbours, 16 w + 2 (l / 4) of its warp w and lane l, as the products' rows l / 4 and l / 4 + 8. Its rows of a tile:
// 16 s + 2 (l % 4) + 0, 1, 8, 9. C comes asynchronously, a warp's 16 columns of a tile at a time, into two boxes that each warp has to itself,
// always a tile ahead; it goes back from registers.
// Rows are dealt to a cluster's blocks, whose partial W^T meet in shared memory, in the boxes' place (each block adds up its share in rank
// order and gives it to all). A block keeps `slots` tiles of V; with more rows than that the slots (two at least, or all) are refilled on the way.
// Shared memory: barriers, V (slots pairs of each panel), T of each panel, S, two boxes for each warp, for some products 16 KiB for each warpgroup.
struct LarfbArgs {
    const float* src;
    float* dst;
    const uint8_t* v_tiles[2];     // of the panel at `col` and of the one right of it
    const uint8_t* t[2];
    int n, col, row_blocks, first, units, chunks, slots, ranks;   // first column of the units; chunks: clusters of `ranks` blocks that share a matrix's units
};
constexpr int kLarfbGroups = 2, kLarfbSlots = 8;              // at most: warpgroups of a block, tiles of V in its shared memory
constexpr int larfb_shared_bytes(int panels, int slots, int groups, bool staged) {
    return 1024 + (slots * panels + 2 * panels - 1 + groups * (staged ? 3 : 2)) * kPairBytes;
}

// kBoxes: tensor map `map` loads C (batch x n x n, of boxes of 64 rows x 16 columns); otherwise n may be anything.
template <class Product, int kPanels, bool kBoxes>
__global__ void __launch_bounds__(128 * kLarfbGroups, 1) larfb_kernel(const __grid_constant__ CUtensorMap map, const LarfbArgs p) {
    extern __shared__ __align__(1024) uint8_t shared[];
    constexpr int kSlotBytes = kPanels * kPairBytes;
    const int tid = threadIdx.x, lane = tid % 32, warp = __shfl_sync(0xffffffffu, tid / 32, 0), group = warp / 4, in_group = tid % 128, groups = blockDim.x / 128;
    const int ranks = p.ranks, rank = blockIdx.x % ranks;                    // known to be uniform, unlike the special registers
    // Addresses in shared memory are made where they are used: `fresh` hides from the compiler that it could keep (and spill) them.
    int nothing = 0;
    const auto fresh = [&] { asm volatile("" : "+r"(nothing)); };
    const auto bars = [&](int i) { return reinterpret_cast<uint64_t*>(shared + nothing) + i; };
    const auto full = [&](int slot) { return bars(slot); };                 // slot has been loaded
    const auto t_full = [&] { return bars(kLarfbSlots); };
    const auto met = [&](int i) { return bars(kLarfbSlots + 1 + 2 * group + i); };   // one arrival from each rank
    const auto loaded = [&](int i) { return bars(kLarfbSlots + 1 + 2 * kLarfbGroups + 2 * warp + i); };   // the warp's boxes
    uint64_t* const done = reinterpret_cast<uint64_t*>(shared) + kLarfbSlots + 1 + 10 * kLarfbGroups;
    const auto readers = [&](int slot) { return reinterpret_cast<int*>(bars(kLarfbSlots + 1 + 10 * kLarfbGroups + 6)) + slot; };   // warps that have read it
    Product product(done, reinterpret_cast<uint32_t*>(done + 5));
    const auto slot_at = [&](int slot) { return shared + nothing + 1024 + slot * kSlotBytes; };
    const auto sT = [&](int i) { return slot_at(p.slots) + i * kPairBytes; };           // T1, T2, S
    const auto meeting = [&] { return sT(2 * kPanels - 1 + 2 * group); };   // the warpgroup's boxes: 0 of its four warps, 1 of them
    const auto box_at = [&](int t) { return meeting() + t % 2 * kPairBytes + warp % 4 * kBoxBytes; };
    const auto stage = [&] { return sT(2 * kPanels - 1 + 2 * groups + group); };
    const int chunk = blockIdx.x / ranks % p.chunks, unit1 = static_cast<long>(p.units) * (chunk + 1) / p.chunks;
    const int matrix = blockIdx.x / ranks / p.chunks;
    const int tile0 = static_cast<long>(p.row_blocks) * rank / ranks, tiles = static_cast<long>(p.row_blocks) * (rank + 1) / ranks - tile0;
    const int row0 = p.col + 64 * tile0, rows = min(64 * tiles, p.n - row0);
    const bool refills = tiles > p.slots;

    if (tid == 0) {
        for (int s = 0; s < p.slots; ++s) { barrier_init(full(s), kPanels * kPairArrivals); *readers(s) = 0; }
        barrier_init(t_full(), kPanels * kPairArrivals);
        for (int i = 0; i < 2 * kLarfbGroups; ++i) barrier_init(met(i), ranks);                 // of all: warp 0 says so
        for (int i = 0; i < 8 * groups; ++i) barrier_init(loaded(i), kBoxes ? 1 : 32);
        fence_async_proxy();
    }
    if (ranks > 1) cluster_sync();
    else __syncthreads();
    const auto load_tile = [&](int slot, int t) {                           // a warp's
        uint8_t* const to = slot_at(slot);
        long first = matrix;
        asm volatile("" : "+l"(first));                                     // addresses made here, not kept from the start (and spilled)
        load_pair(to, p.v_tiles[0] + (first * p.row_blocks + tile0 + t) * kPairBytes, full(slot));
        if (kPanels == 2) {
            if (tile0 + t > 0) {
                load_pair(to + kPairBytes, p.v_tiles[1] + (first * (p.row_blocks - 1) + tile0 + t - 1) * kPairBytes, full(slot));
            } else {                                                        // V2 is zero above its panel
                for (int at = 16 * lane; at < kPairBytes; at += 512) *reinterpret_cast<uint4*>(to + kPairBytes + at) = make_uint4(0, 0, 0, 0);
                fence_async_proxy();
                __syncwarp();
                if (lane < kPairArrivals) barrier_arrive(full(slot));
            }
        }
    };
    if (warp == 0) {
        for (int t = 0; t < min(tiles, p.slots); ++t) load_tile(t, t);
#pragma unroll
        for (int i = 0; i < kPanels; ++i) load_pair(sT(i), p.t[i] + static_cast<long>(matrix) * kPairBytes, t_full());
    }
    const auto column_of = [&](int u) { return p.first + 64 * u + warp % 4 * 16; };      // the warp's first one of unit u
    const auto load_box = [&](int u, int t) {                               // tile t's; a warp's
        const int column = column_of(u), row = row0 + 64 * t;
        if constexpr (kBoxes) load_box_async(box_at(t), map, column, row, matrix, loaded(t % 2));
        else load_box_plain(box_at(t), p.src, p.n, column, row, matrix, loaded(t % 2));
    };
    int unit = static_cast<long>(p.units) * chunk / p.chunks + group;
    if (unit < unit1)
        for (int t = 0; t < min(tiles, 2); ++t) load_box(unit, t);

    const auto after = [&](int slot) { return slot + 1 < p.slots ? slot + 1 : 0; };
    const auto before = [&](int slot) { return slot ? slot - 1 : p.slots - 1; };
    uint32_t full_parity = 0, loaded_parity = 0;
    auto wait_for = [&](int slot) {
        barrier_wait(full(slot), full_parity >> slot & 1);
        full_parity ^= 1u << slot;
    };
    auto wait_for_box = [&](int t) {
        barrier_wait(loaded(t % 2), loaded_parity >> t % 2 & 1);
        loaded_parity ^= 1u << t % 2;
    };
    // The warp has read a slot. The last warp to say so refills it: nobody waits.
    auto release = [&](int slot, int next) {
        int count = 0;
        __syncwarp();
        if (lane == 0) count = count_block(readers(slot));
        if (__shfl_sync(0xffffffffu, count, 0) == 4 * groups - 1) {
            if (lane == 0) *readers(slot) = 0;                               // seen by the next readers with the tile
            load_tile(slot, next);
        }
    };
    const int in_box = box_offset(lane % 4 * 2, lane / 4 * 2);
    const auto row_of = [](int j) { return j % 2 + j / 2 * 8; };            // the thread's rows 0, 1, 8, 9 of 16
    const auto in_tile = [&](int t, int s, int j) { return *reinterpret_cast<const float2*>(box_at(t) + in_box + 64 * (16 * s + row_of(j))); };
    int meetings = 0;
    // The partial sums f[0], f[1], summed over the ranks in their order: two read each other's; more than two add up a share each and give it to
    // all. The boxes are free again once `leave` has returned.
    auto meet = [&](Fragment (&f)[kPanels]) {
        float4* const sum = reinterpret_cast<float4*>(meeting());
        group_sync(group);                                                  // every warp has read its boxes
#pragma unroll
        for (int i = 0; i < kPanels; ++i)
#pragma unroll
            for (int b = 0; b < 8; ++b) sum[1024 * i + 128 * b + in_group] = make_float4(f[i].v[b][0].x, f[i].v[b][0].y, f[i].v[b][1].x, f[i].v[b][1].y);
        group_sync(group);
        if (in_group < ranks) barrier_arrive_in(met(0), in_group);
        barrier_wait_cluster(met(0), meetings & 1);
        const float4* from = sum;
        if (ranks == 2) {
            from = in_rank(sum, rank ^ 1);
        } else {
            for (int e = 1024 * kPanels * rank / ranks + in_group; e < 1024 * kPanels * (rank + 1) / ranks; e += 128) {
                float4 total = make_float4(0, 0, 0, 0);
#pragma unroll 4
                for (int q = 0; q < ranks; ++q) {
                    const float4 x = in_rank(sum, q)[e];
                    total = make_float4(total.x + x.x, total.y + x.y, total.z + x.z, total.w + x.w);
                }
#pragma unroll 1
                for (int q = 0; q < ranks; ++q) in_rank(sum, q)[e] = total;
            }
            group_sync(group);
            if (in_group < ranks) barrier_arrive_in(met(1), in_group);
            barrier_wait_cluster(met(1), meetings & 1);
        }
#pragma unroll
        for (int i = 0; i < kPanels; ++i)
#pragma unroll
            for (int b = 0; b < 8; ++b) {
                const float4 x = from[1024 * i + 128 * b + in_group];
                float2(&v)[2] = f[i].v[b];
                if (ranks == 2) {                                           // the same sum in both
                    v[0] = make_float2(v[0].x + x.x, v[0].y + x.y);
                    v[1] = make_float2(v[1].x + x.z, v[1].y + x.w);
                } else {
                    v[0] = make_float2(x.x, x.y);
                    v[1] = make_float2(x.z, x.w);
                }
            }
        group_sync(group);
        if (ranks == 2 && in_group < 2) barrier_arrive_in(met(1), in_group);
    };
    auto leave = [&] {
        if (ranks == 2) barrier_wait_cluster(met(1), meetings & 1);        // the other has read
        ++meetings;
        fence_async_proxy();
        group_sync(group);
    };

    // -S in two parts, from the warpgroups' sums, added up over them and over the ranks
    [[maybe_unused]] const auto make_s = [&] {
        Fragment f;
        if (group < tiles) product.template read_group<kPanels>(f);
        else f = {};
        float4* const sum = reinterpret_cast<float4*>(sT(2));
        for (int g = 0; g < groups; ++g) {
            if (g == group)
#pragma unroll
                for (int b = 0; b < 8; ++b) {
                    const float4 old = g ? sum[128 * b + in_group] : make_float4(0, 0, 0, 0);
                    sum[128 * b + in_group] = make_float4(old.x - f.v[b][0].x, old.y - f.v[b][0].y, old.z - f.v[b][1].x, old.w - f.v[b][1].y);
                }
            __syncthreads();
        }
        if (ranks > 1) cluster_sync();
        if (ranks > 2) {                                                    // each adds up its share and gives it to all
            for (int e = 1024 * rank / ranks + tid; e < 1024 * (rank + 1) / ranks; e += 128 * groups) {
                float4 total = make_float4(0, 0, 0, 0);
#pragma unroll 4
                for (int q = 0; q < ranks; ++q) {
                    const float4 x = in_rank(sum, q)[e];
                    total = make_float4(total.x + x.x, total.y + x.y, total.z + x.z, total.w + x.w);
                }
#pragma unroll 1
                for (int q = 0; q < ranks; ++q) in_rank(sum, q)[e] = total;
            }
            cluster_sync();
        }
        if (group == 0) {
            f = {};
#pragma unroll 1
            for (int q = 0; q < (ranks == 2 ? 2 : 1); ++q)
#pragma unroll
                for (int b = 0; b < 8; ++b) {
                    const float4 x = (ranks == 2 ? in_rank(sum, q) : sum)[128 * b + in_group];
                    f.v[b][0] = make_float2(f.v[b][0].x + x.x, f.v[b][0].y + x.y);
                    f.v[b][1] = make_float2(f.v[b][1].x + x.z, f.v[b][1].y + x.w);
                }
        }
        if (ranks == 2) cluster_sync();
        else __syncthreads();
        if (group == 0) {
#pragma unroll
            for (int b = 0; b < 8; ++b)
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    uint32_t high, low;
                    split_bf16(f.v[b][half].x, f.v[b][half].y, high, low);
                    uint8_t* const to = sT(2) + tile_offset(warp * 16 + lane / 4 + 8 * half, 8 * b + lane % 4 * 2);
                    *reinterpret_cast<uint32_t*>(to) = high;
                    *reinterpret_cast<uint32_t*>(to + kTileBytes) = low;
                }
            fence_async_proxy();
        }
        __syncthreads();
    };

    const int first_unit = unit - group;
#pragma unroll 1
    for (; unit - group < unit1; unit += groups) {
        const bool first = unit - group == first_unit;
        const auto wait_forward = [&](int t, int slot) { if (first || t >= p.slots) wait_for(slot); };
        const auto wait_backward = [&](int t, int slot) { if (t < tiles - p.slots) wait_for(slot); };
        if (unit >= unit1) {                                                // nothing left for this warpgroup, but the others need refills
            if (refills) {
                for (int t = 0, slot = 0; t < tiles; ++t, slot = after(slot)) {
                    wait_forward(t, slot);
                    if (t + p.slots < tiles) release(slot, t + p.slots);
                }
                for (int t = tiles - 1, slot = t % p.slots; t >= 0; --t, slot = before(slot)) {
                    wait_backward(t, slot);
                    if (t >= p.slots) release(slot, t - p.slots);
                }
            }
            continue;
        }
        Operand a[2];
        // 1. W^T = C^T V
#pragma unroll 1
        for (int t = 0, slot = 0; t < tiles; ++t, slot = after(slot)) {
            fresh();
            wait_for_box(t);
#pragma unroll
            for (int s = 0; s < 4; ++s)
#pragma unroll
                for (int e = 0; e < 2; ++e) {
                    const float2 x = in_tile(t, s, 2 * e), y = in_tile(t, s, 2 * e + 1);
                    split_bf16(x.x, y.x, a[0].high[s][2 * e], a[0].low[s][2 * e]);
                    split_bf16(x.y, y.y, a[0].high[s][2 * e + 1], a[0].low[s][2 * e + 1]);
                }
            __syncwarp();
            if (t + 2 < tiles) load_box(unit, t + 2);                       // the last two stay for step 3
            wait_forward(t, slot);
            product.template start_registers<Form::kAB, 0, kPanels>(a[0], slot_at(slot), stage(), t == 0);
            if constexpr (kPanels == 2)
                if (first && t % groups == group) product.template start_pairs<Form::kAtB, kPanels>(slot_at(slot), slot_at(slot) + kPairBytes, t == group);
            product.finish_group();
            if (t + p.slots < tiles) release(slot, t + p.slots);
        }
        Fragment f[kPanels];
        if constexpr (kPanels == 2)
            if (first) make_s();
        product.read_group(f[0]);
        if constexpr (kPanels == 2) product.template read_group<1>(f[1]);
        if (ranks > 1) meet(f);
        // 2. Y^T = W^T T
        fresh();
        if (first) barrier_wait(t_full(), 0);
        split(a[0], f[0]);
        product.template start_registers<Form::kAB, 0, 1>(a[0], sT(0), stage(), true);
        product.finish_group();
        product.read_group(f[0]);
        split(a[0], f[0]);
        if constexpr (kPanels == 2) {
            product.template start_registers<Form::kAB, 0, 1>(a[0], sT(2), stage(), true);
            product.finish_group();
            product.read_group(f[0]);
#pragma unroll
            for (int i = 0; i < 16; ++i) {
                float2 &w = f[1].v[i / 2][i % 2], y = f[0].v[i / 2][i % 2];
                w = make_float2(w.x + y.x, w.y + y.y);
            }
            split(a[1], f[1]);
            product.template start_registers<Form::kAB, 0, 1>(a[1], sT(1), stage(), true);
            product.finish_group();
            product.read_group(f[0]);
            split(a[1], f[0]);
        }
        if (ranks > 1) {
            leave();
#pragma unroll 1
            for (int t = max(0, tiles - 2); t < tiles; ++t) load_box(unit, t);
        }
        // 3. C^T -= Y^T V^T
        const int column = column_of(unit) + lane / 4 * 2;
        const bool pair = kBoxes || column + 1 < p.n;                       // the thread's second column is still C's
        const int left = column < p.n ? rows - lane % 4 * 2 : 0;            // rows of C from the thread's first one to the end
        float* const dst = p.dst + ((static_cast<long>(matrix) * p.n + row0 + lane % 4 * 2) * p.n + column);
#pragma unroll 1
        for (int t = tiles - 1, slot = t % p.slots; t >= 0; --t, slot = before(slot)) {
            fresh();
            wait_backward(t, slot);
            product.template start_registers<Form::kABt, 0, 1>(a[0], slot_at(slot), stage(), true);
            if constexpr (kPanels == 2) product.template start_registers<Form::kABt, 0, 1>(a[1], slot_at(slot) + kPairBytes, stage(), false);
            if (ranks > 1 || t < tiles - 2) wait_for_box(t);
            float2 c[4][4];
#pragma unroll
            for (int s = 0; s < 4; ++s)
#pragma unroll
                for (int j = 0; j < 4; ++j) c[s][j] = in_tile(t, s, j);
            __syncwarp();
            if (t >= 2) load_box(unit, t - 2);
            else if (unit + groups < unit1) load_box(unit + groups, t);
            product.finish_group();
            product.read_group(f[0]);
            if (t >= p.slots) release(slot, t - p.slots);
            int n = p.n, more = left - 64 * t;
            asm volatile("" : "+r"(n));                                     // its multiples are made here, as above
            float* row0_at = dst + 64l * t * n;
#pragma unroll
            for (int s = 0; s < 4; ++s, row0_at += 16 * n, more -= 16)
#pragma unroll
                for (int j = 0; j < 4; ++j) {
                    const float2 *const y = f[0].v[2 * s + j / 2], x = c[s][j];
                    const float2 z = j % 2 ? make_float2(x.x - y[0].y, x.y - y[1].y) : make_float2(x.x - y[0].x, x.y - y[1].x);
                    float* const at = row0_at + row_of(j) * n;
                    if (row_of(j) < more) {
                        if (kBoxes) __stcs(reinterpret_cast<float2*>(at), z);   // C to come has the better claim to L2
                        else { at[0] = z.x; if (pair) at[1] = z.y; }
                    }
                }
        }
    }
    product.close();
}

// ---------------------------------------------------------------------------------------------------------------------
// Host driver
// ---------------------------------------------------------------------------------------------------------------------
// Everything goes to the default queue, in order. Errors come back as a text that names the kernel; nothing is printed.
// A build is of one backend: less to compile.
#if defined(KITTENS_HOPPER)
template <int kSums> using Products = Wgmma<kSums>;
#elif defined(KITTENS_BLACKWELL)
template <int kSums> using Products = Tcgen05<kSums>;
#else
template <int kSums> using Products = MmaSync<kSums>;
#endif
constexpr int kStepInts = 15, kPair = 2;
enum StepKind { kWhole = 0, kPanel = 1, kClusterPanel = 2, kTallPanel = 3 };

namespace {
thread_local char error_text[256];

struct Launcher {
    const char* error = nullptr;
    int shared_limit = 0, multiprocessors = 0;
    bool beside = false;   // the next kernel may start before the one before it has ended
    Launcher() {
        int device = 0;
        if (cudaGetDevice(&device) != cudaSuccess || cudaDeviceGetAttribute(&shared_limit, cudaDevAttrMaxSharedMemoryPerBlockOptin, device) != cudaSuccess
            || cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device) != cudaSuccess)
            error = "qr_geqrf: no current CUDA device";
    }
    template <typename... Args>
    void operator()(const char* name, void (*kernel)(Args...), long blocks, int threads, int smem_bytes, int ranks, Args... args) {
        if (error) return;
        // Always the device's limit: one thread's small launch must not lower what another's large one needs.
        cudaError_t status = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_limit);
        if (status == cudaSuccess && ranks > 8) status = cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
        if (status == cudaSuccess) {
            cudaLaunchConfig_t config = {};
            cudaLaunchAttribute attributes[2] = {};
            config.gridDim = dim3(static_cast<unsigned>(blocks));
            config.blockDim = dim3(threads);
            config.dynamicSmemBytes = smem_bytes;
            config.attrs = attributes;
            if (ranks > 1) {
                cudaLaunchAttribute& attribute = attributes[config.numAttrs++];
                attribute.id = cudaLaunchAttributeClusterDimension;
                attribute.val.clusterDim.x = ranks;
                attribute.val.clusterDim.y = attribute.val.clusterDim.z = 1;
            }
            if (beside) {
                // Programmatic dependent launch, on the same queue: it starts once every block of the kernel before has come to
                // allow_next_kernel, and what is launched next waits for both. By number, since the board refuses its name.
                cudaLaunchAttribute& attribute = attributes[config.numAttrs++];
                attribute.id = static_cast<cudaLaunchAttributeID>(6);
                *reinterpret_cast<int*>(&attribute.val) = 1;
            }
            status = cudaLaunchKernelEx(&config, kernel, args...);
        }
        beside = false;
        if (status != cudaSuccess) {
            cudaGetLastError();                                             // a refused launch must not poison the next call
            snprintf(error_text, sizeof error_text, "%s: %ld blocks of %d threads, %d bytes of shared memory, clusters of %d: %s",
                     name, blocks, threads, smem_bytes, ranks, cudaGetErrorString(status));
            error = error_text;
        }
    }
    // C (batch x n x n, n a multiple of 4) in boxes, as load_box_async wants them
    CUtensorMap box_map(const float* C, int batch, int n) {
        static const auto [encode, found] = [] {
            void* function = nullptr;
            cudaDriverEntryPointQueryResult result;
#if CUDART_VERSION >= 12050
            const cudaError_t status = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &result);
#else
            const cudaError_t status = cudaGetDriverEntryPoint("cuTensorMapEncodeTiled", &function, cudaEnableDefault, &result);
#endif
            return std::pair(reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(function), status == cudaSuccess && result == cudaDriverEntryPointSuccess);
        }();
        CUtensorMap map = {};
        const cuuint64_t sizes[] = {static_cast<cuuint64_t>(n), static_cast<cuuint64_t>(n), static_cast<cuuint64_t>(batch)}, strides[] = {4ull * n, 4ull * n * n};
        const cuuint32_t box[] = {16, 64, 1}, steps[] = {1, 1, 1};
        if (!error && !(found && encode(&map, CU_TENSOR_MAP_DATA_TYPE_FLOAT32, 3, const_cast<float*>(C), sizes, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
                                        CU_TENSOR_MAP_SWIZZLE_64B, CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS)) {
            snprintf(error_text, sizeof error_text, "larfb_kernel: no tensor map for %d matrices of n = %d", batch, n);
            error = error_text;
        }
        return map;
    }
};

template <int Q> void geqr2_whole(Launcher& launch, const PanelArgs& p, int batch) {
    using Shape = Geqr2WholeShape<Q>;
    launch("geqr2_whole_kernel", geqr2_whole_kernel<Q>, batch, Shape::kThreads, Shape::kSmemBytes, 1, p);
}
template <int R, int CW, int NW> void geqr2(Launcher& launch, const PanelArgs& p, int batch) {
    using Shape = Geqr2Shape<R, CW, NW>;
    launch("geqr2_kernel", geqr2_kernel<R, CW, NW>, batch, Shape::kThreads, Shape::kSmemBytes, 1, p);
}
template <int R> void geqr2_cluster(Launcher& launch, const PanelArgs& p, int batch, int ranks) {
    using Shape = Geqr2ClusterShape<R>;
    launch("geqr2_cluster_kernel", geqr2_cluster_kernel<R>, static_cast<long>(batch) * ranks, Shape::kThreads, Shape::kSmemBytes, ranks, p);
}
void panel(Launcher& launch, const PanelUpdate& update, const PanelArgs& p, const int* todo, int batch, int ranks) {
    const long blocks = static_cast<long>(batch) * ranks;
    launch("panel_kernel", p.n % 4 ? panel_kernel<Products<2>, false, 1> : blocks > launch.multiprocessors ? panel_kernel<Products<2>, true, 2> : panel_kernel<Products<2>, true, 1>,
           blocks, kThreads, PanelShared::kBytes, ranks, update, p, todo);
}
void pair(Launcher& launch, const PanelPair& p, int batch, int ranks) {
    launch("pair_kernel", p.panel[0].n % 4 ? pair_kernel<Products<2>, false> : pair_kernel<Products<2>, true>, static_cast<long>(batch) * ranks, kThreads, PanelShared::kBytes, ranks, p);
}
template <int kPanels> void larfb(Launcher& launch, const LarfbArgs& p, int batch, int groups) {
    using Product = Products<kPanels + 1>;
    const bool boxes = Product::kAsync && p.n % 4 == 0;
    launch("larfb_kernel", boxes ? larfb_kernel<Product, kPanels, Product::kAsync> : larfb_kernel<Product, kPanels, false>, static_cast<long>(batch) * p.chunks * p.ranks,
           128 * groups, larfb_shared_bytes(kPanels, p.slots, groups, Product::kStaged), p.ranks, boxes ? launch.box_map(p.src, batch, p.n) : CUtensorMap{}, p);
}
void larfb(Launcher& launch, const LarfbArgs& p, int batch, int panels, int groups) {
    if (panels == 2) larfb<2>(launch, p, batch, groups);
    else larfb<1>(launch, p, batch, groups);
}
}  // namespace

// Sets of V tiles and T that panels take by turns: two, or four where panels are factored while those before them are still being applied.
static int work_sets(const int* steps, int count) {
    for (int i = 0; i < count; ++i)
        if (steps[i * kStepInts + 11]) return 4;
    return 2;
}
static long set_bytes(int batch, int n) { return static_cast<long>(batch) * ((n + 63) / 64 + 1) * kPairBytes; }

// Factors A (batch x n x n, row-major) into H and tau. steps: count x (kind, first column, R and ranks of the column-by-column kernel; 0 or, if
// that is for declined matrices only, 1 or, together with the next panel, kPair, and ranks of the panel kernel; panels whose update follows, its ranks, chunks, slots, warpgroups; the same four of
// the part of it that goes ahead), in order of columns. A step after one with no update to follow updates its panel itself.
// work: qr_work_bytes(batch, n, steps, count) bytes, 128-byte aligned; unused when the only step is kWhole. Returns null or an error text.
extern "C" const char* qr_geqrf(const float* A, float* H, float* tau, void* work, int batch, int n, const int* steps, int count) {
    Launcher launch;
    uint8_t* const base = static_cast<uint8_t*>(work);
    const int sets = work_sets(steps, count);
    int* const redo = reinterpret_cast<int*>(base + sets * set_bytes(batch, n));
    const auto panel_at = [&](int i) {
        const int* const values = steps + i * kStepInts;
        uint8_t* const set = base + i % sets * set_bytes(batch, n);
        return PanelArgs{values[1] ? H : A, H, tau, set + static_cast<long>(batch) * kPairBytes, set, values[4] ? redo + i % 2 * static_cast<long>(batch) : nullptr,
                         n, values[1], (n - values[1] + 63) / 64};
    };
    struct { LarfbArgs args; int panels, groups = 0; } rest;               // of an update, launched beside the panel kernel that follows
    for (int i = 0; i < count && !launch.error; ++i) {
        const int *const values = steps + i * kStepInts, kind = values[0], R = values[2], ranks = values[3];
        const PanelArgs p = panel_at(i);
        if (kind == kWhole) {
            switch (R) {
                case 4: geqr2_whole<1>(launch, p, batch); break;
                case 8: geqr2_whole<2>(launch, p, batch); break;
                case 12: geqr2_whole<3>(launch, p, batch); break;
                case 16: geqr2_whole<4>(launch, p, batch); break;
                case 20: geqr2_whole<5>(launch, p, batch); break;
                case 24: geqr2_whole<6>(launch, p, batch); break;
                case 28: geqr2_whole<7>(launch, p, batch); break;
                case 32: geqr2_whole<8>(launch, p, batch); break;
                case 36: geqr2_whole<9>(launch, p, batch); break;
                case 40: geqr2_whole<10>(launch, p, batch); break;
                case 44: geqr2_whole<11>(launch, p, batch); break;
                case 48: geqr2_whole<12>(launch, p, batch); break;
                default: return "qr_geqrf: no whole-matrix kernel for this number of rows";
            }
            continue;
        }
        const bool first = values[4] == kPair, second = i && !values[6 - kStepInts], done = i && values[4 - kStepInts] == kPair;
        PanelArgs before = p;
        if (second) before = panel_at(i - 1);
        const PanelUpdate by_first = {before.src, H, before.v_tiles, before.t, before.col, before.row_blocks};
        if (first) pair(launch, {{p, panel_at(i + 1)}, by_first}, batch, values[5]);
        else if (second || p.redo) panel(launch, second ? by_first : PanelUpdate{}, p, done ? before.redo : nullptr, batch, values[5]);
        if (rest.groups) {
            launch.beside = true;
            larfb(launch, rest.args, batch, rest.panels, rest.groups);
            rest.groups = 0;
        }
        if (kind == kPanel) {
            switch (R) {
                case 8: geqr2<8, 8, 8>(launch, p, batch); break;
                case 16: geqr2<16, 4, 16>(launch, p, batch); break;
                default: return "qr_geqrf: no panel kernel for this number of rows";
            }
        } else if (kind == kTallPanel) {
            launch("geqr2_tall_kernel", geqr2_tall_kernel, static_cast<long>(batch) * ranks, Geqr2TallShape::kThreads, Geqr2TallShape::kSmemBytes, ranks, p);
        } else {
            switch (R) {
                case 2: geqr2_cluster<2>(launch, p, batch, ranks); break;
                case 4: geqr2_cluster<4>(launch, p, batch, ranks); break;
                case 8: geqr2_cluster<8>(launch, p, batch, ranks); break;
                case 16: geqr2_cluster<16>(launch, p, batch, ranks); break;
                default: return "qr_geqrf: no cluster kernel for this number of rows";
            }
        }
        if (!values[6]) continue;
        const int column = p.col + kPanelWidth, units = p.row_blocks - 1, panels = values[6];
        const auto larfb_args = [&](int from, int units, const int* shape) {
            return LarfbArgs{before.src, H, {before.v_tiles, p.v_tiles}, {before.t, p.t}, n, before.col, before.row_blocks, from, units, shape[1], shape[2], shape[0]};
        };
        if (values[11]) {
            const int ahead = values[6 + kStepInts] ? 1 : 2;                // panels that come next
            larfb(launch, larfb_args(column, ahead, values + 11), batch, panels, values[14]);
            rest.args = larfb_args(column + ahead * kPanelWidth, units - ahead, values + 7);
            rest.panels = panels;
            rest.groups = values[10];
        } else {
            larfb(launch, larfb_args(column, units, values + 7), batch, panels, values[10]);
        }
    }
    return launch.error;
}
extern "C" long qr_work_bytes(int batch, int n, const int* steps, int count) {
    return work_sets(steps, count) * set_bytes(batch, n) + 2l * batch * static_cast<long>(sizeof(int));
}

// How many clusters of `ranks` blocks the current device holds at once, each block with a multiprocessor to itself; 0 if none.
extern "C" int qr_resident_clusters(int ranks) {
    using Shape = Geqr2ClusterShape<16>;
    cudaLaunchConfig_t config = {};
    cudaLaunchAttribute attribute = {};
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim.x = ranks;
    attribute.val.clusterDim.y = attribute.val.clusterDim.z = 1;
    config.gridDim = dim3(ranks);
    config.blockDim = dim3(Shape::kThreads);
    config.dynamicSmemBytes = Shape::kSmemBytes;
    config.attrs = &attribute;
    config.numAttrs = 1;
    int clusters = 0;
    if (cudaFuncSetAttribute(geqr2_cluster_kernel<16>, cudaFuncAttributeMaxDynamicSharedMemorySize, Shape::kSmemBytes) == cudaSuccess
        && cudaFuncSetAttribute(geqr2_cluster_kernel<16>, cudaFuncAttributeNonPortableClusterSizeAllowed, 1) == cudaSuccess
        && cudaOccupancyMaxActiveClusters(&clusters, geqr2_cluster_kernel<16>, &config) == cudaSuccess)
        return clusters;
    cudaGetLastError();
    return 0;
}
"""

# =====================================================================================================================
# C++ entry point
# =====================================================================================================================
CPP_SOURCE = r"""
#include <ATen/core/Tensor.h>
#include <ATen/ops/clone.h>
#include <ATen/ops/empty.h>
#include <c10/core/DeviceGuard.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>

extern "C" const char* qr_geqrf(const float*, float*, float*, void*, int, int, const int*, int);
extern "C" long qr_work_bytes(int, int, const int*, int);
extern "C" int qr_resident_clusters(int);

// A: batch x n x n, float32, CUDA, contiguous; steps: the plan's, flattened to 32-bit integers. Returns H, tau. Work space from torch's allocator:
// 512 bytes a row of A and 32 KiB a matrix, twice that where panels are factored beside updates, but at most a quarter of A and 64 MiB; where
// that is less than all need, they go in several parts.
std::tuple<at::Tensor, at::Tensor> geqrf(const at::Tensor& A, const pybind11::bytes& steps) {
    const c10::DeviceGuard guard(A.device());
    const auto options = A.options().requires_grad(false);
    const int batch = A.size(0), n = A.size(1), count = PYBIND11_BYTES_SIZE(steps.ptr()) / (15 * sizeof(int));
    const int* const values = reinterpret_cast<const int*>(PYBIND11_BYTES_AS_STRING(steps.ptr()));
    // The kernels load 16 bytes at a time; a view may start anywhere.
    const at::Tensor aligned = reinterpret_cast<uintptr_t>(A.const_data_ptr()) % 16 ? A.clone() : A;
    at::Tensor H = at::empty(A.sizes(), options), tau = at::empty({batch, n}, options), work;
    int part = batch;
    if (count > 1) {
        const long limit = A.numel() + (64l << 20);                         // in bytes: a quarter of 4 A.numel(), and 64 MiB
        const long parts = (qr_work_bytes(batch, n, values, count) + limit - 1) / limit;
        part = (batch + parts - 1) / parts;
        work = at::empty({qr_work_bytes(part, n, values, count)}, options.dtype(at::kByte));
    }
    const long square = static_cast<long>(n) * n;
    for (long first = 0; first < batch; first += part) {
        const char* error = qr_geqrf(aligned.const_data_ptr<float>() + first * square, H.mutable_data_ptr<float>() + first * square, tau.mutable_data_ptr<float>() + first * n,
                                     count > 1 ? work.mutable_data_ptr() : nullptr, std::min<long>(part, batch - first), n, values, count);
        TORCH_CHECK(!error, error);
    }
    return {H, tau};
}

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
    module.def("geqrf", &geqrf);
    module.def("resident_clusters", &qr_resident_clusters);
}
"""

# =====================================================================================================================
# Build
# =====================================================================================================================
THUNDERKITTENS_URL = "https://github.com/HazyResearch/ThunderKittens"
THUNDERKITTENS_COMMIT = "0b55588d2769dde0c7a9a606ffc015b0ca7a9551"
APART = ("tcgen05",)   # backends whose fault may be a hang: they prove themselves in a child process
PROOF_SECONDS = 60     # of such a proof, at most
WRONG = 3              # its exit status for a wrong result
BACKENDS = "mma", "wgmma", "tcgen05"


class BuildError(RuntimeError):
    """The extension could not be built here; the message says what is missing or what the compiler said."""


def thunderkittens_cache() -> Path:
    """The user's cache folder for ThunderKittens at the pinned commit."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "thunderkittens" / THUNDERKITTENS_COMMIT


def find_thunderkittens() -> Path:
    """The include folder of ThunderKittens: THUNDERKITTENS_ROOT, ./ThunderKittens, the user's cache folder, or cloned once.

    Raises BuildError if THUNDERKITTENS_ROOT is wrong, or nothing is found and it cannot be cloned."""
    header = Path("include") / "kittens.cuh"
    root = os.environ.get("THUNDERKITTENS_ROOT")
    if root:
        if not (Path(root) / header).is_file():
            raise BuildError(f"THUNDERKITTENS_ROOT={root} has no {header}")
        return Path(root) / "include"
    cache = thunderkittens_cache()
    for place in (Path.cwd() / "ThunderKittens", Path(__file__).resolve().parent / "ThunderKittens", cache):
        if (place / header).is_file():
            return place / "include"
    if not shutil.which("git"):
        raise BuildError("ThunderKittens not found, and git, needed to fetch it, is not on PATH: set THUNDERKITTENS_ROOT")
    fresh = cache.with_name(f"{cache.name}.{os.getpid()}")
    fresh.mkdir(parents=True, exist_ok=True)
    try:
        for command in (["init", "--quiet"], ["fetch", "--quiet", "--depth", "1", THUNDERKITTENS_URL, THUNDERKITTENS_COMMIT],
                        ["checkout", "--quiet", "FETCH_HEAD"]):
            subprocess.run(["git", "-C", str(fresh), *command], check=True, capture_output=True, text=True, timeout=60)
        if not cache.exists():
            os.replace(fresh, cache)
    except (subprocess.SubprocessError, OSError) as error:
        said = (getattr(error, "stderr", None) or str(error)).strip().splitlines()
        raise BuildError(f"ThunderKittens not found, and cloning {THUNDERKITTENS_URL} failed ({said[-1] if said else error}): "
                         "set THUNDERKITTENS_ROOT") from error
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
    return cache / "include"


def nvcc_flags(backend: str, capability: tuple[int, int]) -> list[str]:
    """nvcc's options for one backend on one compute capability, include folders apart."""
    major, minor = capability
    suffix = "a" if backend in ("wgmma", "tcgen05") else ""
    kittens = {"wgmma": ["-DKITTENS_HOPPER"], "tcgen05": ["-DKITTENS_BLACKWELL"]}.get(backend, [])
    return [f"-gencode=arch=compute_{major}{minor}{suffix},code=sm_{major}{minor}{suffix}", "-std=c++20", "-O3", "-DNDEBUG", "-lineinfo",
            "--expt-relaxed-constexpr", "--extended-lambda", "-U__CUDA_NO_HALF_OPERATORS__", "-U__CUDA_NO_HALF_CONVERSIONS__",
            "-U__CUDA_NO_BFLOAT16_CONVERSIONS__", "-U__CUDA_NO_HALF2_OPERATORS__", *kittens]


def check_toolchain() -> None:
    """Raise BuildError, naming the tool, if nvcc, ninja or a C++ compiler is missing, or nvcc is of another CUDA than torch."""
    from torch.utils import cpp_extension
    nvcc = Path(cpp_extension.CUDA_HOME or "") / "bin" / "nvcc"
    if not cpp_extension.CUDA_HOME or not nvcc.is_file():
        raise BuildError(f"nvcc not found (CUDA_HOME is {cpp_extension.CUDA_HOME}): install the CUDA toolkit or set CUDA_HOME")
    said = subprocess.run([str(nvcc), "--version"], capture_output=True, text=True).stdout
    version = re.search(r"release (\d+)\.(\d+)", said)
    if version and torch.version.cuda and version[1] != torch.version.cuda.split(".")[0]:
        raise BuildError(f"{nvcc} is CUDA {version[1]}.{version[2]}, but torch {torch.__version__} was built with CUDA {torch.version.cuda}")
    if not cpp_extension.is_ninja_available():
        raise BuildError("ninja is not on PATH: pip install ninja, and put its folder on PATH")
    compiler = os.environ.get("CXX", "c++")
    if not shutil.which(compiler):
        raise BuildError(f"no C++ compiler: {compiler} is not on PATH (install g++ 11 or newer, or set CXX)")
    version = re.search(r"^#define __GNUC__ (\d+)", subprocess.run([compiler, "-dM", "-E", "-x", "c++", os.devnull],
                                                                   capture_output=True, text=True).stdout, re.M)
    if version and int(version[1]) < 11 and "clang" not in compiler:
        raise BuildError(f"{compiler} is g++ {version[1]}: C++20 needs g++ 11 or newer (set CXX)")


def build(backend: str, capability: tuple[int, int]):
    """The extension module for one backend and compute capability: compiled once, then taken from torch's build cache.

    The cache key holds the sources, flags, torch, CUDA and Python. Raises BuildError."""
    check_toolchain()
    from torch.utils.cpp_extension import load_inline
    include = [str(find_thunderkittens())] if backend in ("wgmma", "tcgen05") else []
    flags = nvcc_flags(backend, capability)
    key = "\n".join([CUDA_SOURCE, CPP_SOURCE, *flags, *include, torch.__version__, str(torch.version.cuda), sys.version])
    try:
        return load_inline(f"qr_{backend}_{hashlib.sha256(key.encode()).hexdigest()[:16]}", [CPP_SOURCE], [CUDA_SOURCE],
                           extra_cflags=["-O2", "-std=c++20"], extra_cuda_cflags=flags, extra_include_paths=include, no_implicit_headers=True)
    except (RuntimeError, ImportError, OSError, subprocess.SubprocessError) as error:
        lines = [line for line in str(error).splitlines() if re.search(r"\berror\b|fatal", line)]
        raise BuildError(f"compiling the {backend} extension for compute capability {capability[0]}.{capability[1]} failed: "
                         f"{(lines or [str(error)])[0].strip()}") from error


# =====================================================================================================================
# Choice of the backend, once per device and process
# =====================================================================================================================
class Choice(NamedTuple):
    """A device's backend: its name, the extension (None for geqrf), the device's figures and why nothing better is used."""
    name: str
    extension: object
    info: DeviceInfo | None
    reason: str = ""


def candidates(capability: tuple[int, int]) -> list[str]:
    """Backends for a compute capability, best first."""
    best = {(10, 0): ["tcgen05"], (10, 3): ["tcgen05"], (9, 0): ["wgmma"]}.get(capability, [])
    return best + (["mma"] if capability >= (8, 0) else [])


def proofs(backend: str, info: DeviceInfo) -> list[tuple[int, int]]:
    """(batch, n) of random matrices to factor before a backend is used. Where a fault may be a hang: every kernel that makes products, with
    odd and even n, alone and two blocks on a multiprocessor, with all of V in shared memory and with slots that are refilled."""
    return [(2, 260)] + ([(1, 199), (1, 323), (2 * info.multiprocessors, 256), (4, 1091), (30, 644)] if backend in APART else [])


def prove(extension, backend: str, info: DeviceInfo, index: int) -> None:
    """Factor `proofs` on CUDA device `index` and compare the first and last matrix of each with float64. Raises BuildError if they are not right."""
    for batch, n in proofs(backend, info):
        A = torch.randn(min(batch, 2), n, n, generator=torch.Generator().manual_seed(1)).to(torch.device("cuda", index))
        H, tau = extension.geqrf(A.repeat(batch // len(A), 1, 1), _flat(plan(batch, n, info, backend)))
        A, H, tau = A.double(), H[[0, -1]].double(), tau[[0, -1]].double()
        residual = ((torch.linalg.householder_product(H, tau).mT @ A - H.triu()).abs().sum(1).amax() / A.abs().sum(1).amax()).item()
        if not residual < n * torch.finfo(torch.float32).eps:
            raise BuildError(f"the {backend} backend computed a wrong factorization ({batch} x {n} x {n}: residual {residual:.2g} of the norm)")


def verdict_file(extension, index: int) -> Path:
    """Where the outcome of a proof in a child process is kept, for this extension (its name holds the sources' hash), device and driver."""
    try:
        driver = Path("/proc/driver/nvidia/version").read_text()
    except OSError:
        driver = str(torch._C._cuda_getDriverVersion())
    key = "\n".join([extension.__name__, torch.cuda.get_device_name(index), driver])
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "qr-proofs" / hashlib.sha256(key.encode()).hexdigest()[:16]


def prove_apart(extension, backend: str, index: int) -> None:
    """`prove` in a child process, once: a backend that hangs or breaks its process must not take this one along.

    An outcome (passed, wrong, broke the device, hung) is kept on disk; a child that could not run at all is tried again next time. Raises BuildError."""
    path = verdict_file(extension, index)
    if path.is_file():
        verdict = path.read_text()
    else:
        command = [sys.executable, str(Path(__file__).resolve()), "prove", backend, str(index)]
        child = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        try:
            lines = child.communicate(timeout=PROOF_SECONDS)[1].strip().splitlines() or ["it said nothing"]
        except subprocess.TimeoutExpired:
            child.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):     # the driver may take long to end a kernel that hangs
                child.wait(10)
            verdict = f"the {backend} backend did not finish its proof in {PROOF_SECONDS} s"
        else:
            if child.returncode not in (0, WRONG):
                said = ([line for line in lines if re.match(r"[\w.]*Error\b", line)] or lines)[-1]
                raise BuildError(f"the {backend} backend's proof ended with exit status {child.returncode}: {said}")
            verdict = "" if child.returncode == 0 else lines[-1]
        with contextlib.suppress(OSError):                           # nowhere to keep it: proved anew next time
            path.parent.mkdir(parents=True, exist_ok=True)
            fresh = path.with_name(f"{path.name}.{os.getpid()}")
            fresh.write_text(verdict)
            os.replace(fresh, path)
    if verdict:
        raise BuildError(verdict)


def device_info(extension, index: int) -> DeviceInfo:
    """What routes on CUDA device `index` depend on."""
    properties = torch.cuda.get_device_properties(index)
    with torch.cuda.device(index):
        return DeviceInfo(torch.cuda.get_device_capability(index), properties.multi_processor_count, properties.shared_memory_per_block_optin,
                          tuple(map(extension.resident_clusters, CLUSTER_SIZES)))


@functools.lru_cache(maxsize=None)
def choose_backend(index: int) -> Choice:
    """The backend of CUDA device `index`: the best that builds and proves itself, each failure said once as a warning.

    Raises ValueError for an unknown QR_BACKEND, BuildError if the backend that it names cannot be used."""
    if os.environ.get("QR_FORCE_FALLBACK") == "1":
        return Choice("geqrf", None, None, "QR_FORCE_FALLBACK=1")
    forced = os.environ.get("QR_BACKEND")
    if forced and forced not in (*BACKENDS, "geqrf"):
        raise ValueError(f"QR_BACKEND: expected one of tcgen05, wgmma, mma, geqrf, got {forced!r}")
    if forced == "geqrf":
        return Choice("geqrf", None, None, "QR_BACKEND=geqrf")
    capability = torch.cuda.get_device_capability(index)
    possible = candidates(capability)
    if forced and forced not in possible:
        raise BuildError(f"QR_BACKEND={forced}: compute capability {capability[0]}.{capability[1]} has {', '.join(possible) or 'none'}")
    if not possible:
        reason = f"compute capability {capability[0]}.{capability[1]} is below 8.0"
        warnings.warn(f"custom_kernel uses torch.geqrf: {reason}")
        return Choice("geqrf", None, None, reason)
    reasons = []
    for name in [forced] if forced else possible:
        try:
            extension = build(name, capability)
            if name in APART:
                prove_apart(extension, name, index)
                info = device_info(extension, index)
            else:
                info = device_info(extension, index)
                prove(extension, name, info, index)
            return Choice(name, extension, info, "; ".join(reasons))
        except (BuildError, RuntimeError, OSError) as error:
            if forced:
                raise
            reasons.append(str(error))
            warnings.warn(f"custom_kernel cannot use {name}: {error}")
    return Choice("geqrf", None, None, "; ".join(reasons))


def _flat(route: Plan) -> bytes:
    """The steps as the host driver reads them: 32-bit integers, so that a call converts nothing."""
    return array.array("i", [value for step in route.steps for value in step]).tobytes()


@functools.lru_cache(maxsize=1024)
def _route(index: int, batch: int, n: int) -> tuple[Plan, bytes, object]:
    choice = choose_backend(index)
    route = Plan("geqrf", (), choice.reason) if choice.extension is None else plan(batch, n, choice.info, choice.name)
    return route, _flat(route), choice.extension


def plan_for(A: torch.Tensor) -> Plan:
    """The route that `custom_kernel(A)` takes, for a tensor that it accepts."""
    _check(A)
    if not A.is_cuda:
        return Plan("geqrf", (), f"A is on {A.device}")
    return _route(A.device.index, A.shape[0], A.shape[1])[0]


def _check(A) -> None:
    if not isinstance(A, torch.Tensor):
        raise TypeError(f"A: expected a torch.Tensor, got {type(A).__name__}")
    if A.dim() != 3 or A.shape[1] != A.shape[2]:
        raise ValueError(f"A: expected shape (batch, n, n), got {tuple(A.shape)}")
    if A.dtype is not torch.float32:
        raise TypeError(f"A: expected dtype torch.float32, got {A.dtype}")
    if A.layout is not torch.strided or A.device.type not in ("cuda", "cpu"):
        raise ValueError(f"A: expected a dense tensor on a CUDA device or the CPU, got layout {A.layout} on {A.device}")


# =====================================================================================================================
# Entry point
# =====================================================================================================================
def custom_kernel(data: input_t) -> output_t:
    """(H, tau) of torch.geqrf for data (batch, n, n), float32: H (batch, n, n) and tau (batch, n), float32, same device.

    A CPU tensor goes to torch.geqrf. A tensor that is not contiguous is copied first. The result carries no gradient.
    Raises TypeError for what is no tensor or not float32, ValueError for another shape or device, BuildError if QR_BACKEND
    names a backend that cannot be used, RuntimeError (naming the kernel) if a launch fails, torch.OutOfMemoryError."""
    _check(data)
    if not data.is_cuda or not data.numel():
        return tuple(torch.geqrf(data))
    _, steps, extension = _route(data.device.index, data.shape[0], data.shape[1])
    if not steps:
        return tuple(torch.geqrf(data))
    return extension.geqrf(data.contiguous(), steps)


# =====================================================================================================================
# The child process of prove_apart
# =====================================================================================================================
def _child(arguments: list[str]) -> int:
    """`submission.py prove BACKEND INDEX`: exit status 0, or WRONG with the reason on standard error."""
    if len(arguments) != 3 or arguments[0] != "prove" or arguments[1] not in BACKENDS or not arguments[2].isdigit():
        print(f"usage: submission.py prove {'|'.join(BACKENDS)} INDEX", file=sys.stderr)
        return 2
    backend, index = arguments[1], int(arguments[2])
    extension = build(backend, torch.cuda.get_device_capability(index))
    try:
        prove(extension, backend, device_info(extension, index), index)
    except BuildError as error:
        print(error, file=sys.stderr)
        return WRONG
    except RuntimeError as error:
        if re.search("out of memory|busy or unavailable", str(error)):       # no fault of the backend
            raise
        print(f"the {backend} backend broke: {str(error).splitlines()[0]}", file=sys.stderr)
        return WRONG
    return 0


if __name__ == "__main__":
    status = _child(sys.argv[1:])
    sys.stderr.flush()
    os._exit(status)           # no clearing up on a device that may be broken: it could change the status
