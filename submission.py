"""Batched Householder QR for GPUs: `custom_kernel(A)` returns `(H, tau)` as `torch.geqrf` does.

A is batch x n x n, float32, on a CUDA device. H holds R in its upper triangle and the reflectors' tails below; Q = H_1 ... H_n,
H_k = I - tau_k v_k v_k^T. A is only read. Kernels go to the default queue of A's device, and only there; the call returns
without waiting for them. No derivative, as for torch.geqrf.

How it works: columns are factored in panels of 64 (geqr2). A panel is taken from its Gram matrix, in one meeting of its rows,
unless its columns are nearly dependent: then column by column, in float32. The panel's reflectors V come with T, which gathers
them into I - V T V^T (larft), and are applied to the columns right of it (larfb) on tensor cores, every float32 operand split
into two bf16 parts, three products of parts, float32 sums. A matrix of up to 192 columns is one launch, with no T.

File map
  Route:        plan, plan_for, custom_kernel
  CUDA, shared: split_bf16, take_bf16, warp_sum
  geqr2:        larfg, geqr2_kernel, geqr2_cluster_kernel, geqr2_tall_kernel, gram_panel_kernel (gram_factor, invert_upper)
  larft:        larft (gram_panel_kernel makes its own T)
  larfb:        MmaSync, Wgmma, Tcgen05 (products of tiles), larfb_kernel
  Host driver:  qr_geqrf
  Build:        find_thunderkittens, check_toolchain, build
  Choice:       candidates, prove, choose_backend

Environment
  QR_BACKEND            tcgen05, wgmma, mma or geqrf: use this one or fail
  QR_FORCE_FALLBACK=1   torch.geqrf for everything
  THUNDERKITTENS_ROOT   folder that holds ThunderKittens' include/kittens.cuh
"""
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
WHOLE_LIMIT = 192            # largest matrix that one block keeps in registers
BLOCK_ROWS = 512             # rows of a panel that one block keeps in registers
LARFB_ROWS = 256             # rows of the trailing matrix that one block of the update keeps in registers
BLOCKED_SHARED = 160 * 1024  # bytes of shared memory a block needs beyond 128 rows
WHOLE, SINGLE, CLUSTER, TALL = range(4)   # kinds of Step, as in the CUDA source's StepKind
MAX_BLOCKS = 2**31 - 1       # of one launch


class DeviceInfo(NamedTuple):
    """What a route depends on: compute capability, multiprocessors, bytes of shared memory one block can have, and the
    largest cluster that holds the tallest panel kernel (0: no clusters)."""
    capability: tuple[int, int]
    multiprocessors: int
    shared_bytes: int
    max_cluster: int


class Step(NamedTuple):
    """One panel (and its trailing update), or the last square block whole. Column by column, rows are dealt to `ranks` blocks,
    at most 32 rows_per_lane each (0: any number, kept in memory); the Gram kernel comes first on `gram_ranks` blocks a matrix,
    unless 0. The update deals rows to clusters of `larfb_ranks` blocks."""
    kind: int
    column: int
    rows_per_lane: int
    ranks: int
    gram_ranks: int
    larfb_ranks: int


class Plan(NamedTuple):
    """The route of one shape. `steps` is empty for torch.geqrf, and `reason` then says why."""
    backend: str
    steps: tuple[Step, ...]
    reason: str = ""


def plan(batch: int, n: int, info: DeviceInfo, backend: str) -> Plan:
    """The route of a batch of n x n matrices on a device. Pure.

    A panel of up to 512 rows is one block's. A taller one is spread over a cluster: as few blocks as hold it, then twice as
    many while that leaves no block without a multiprocessor; what no cluster holds stays in memory. A matrix of at most 192
    columns, or the last fewer than 128 of a larger one, is one launch."""
    if backend == "geqrf":
        return Plan("geqrf", (), "torch.geqrf was asked for")
    if n > 128 and info.shared_bytes < BLOCKED_SHARED:
        return Plan("geqrf", (), f"n = {n} needs {BLOCKED_SHARED} bytes of shared memory a block, the device has {info.shared_bytes}")
    steps, column = [], 0
    while n - column > (WHOLE_LIMIT if not steps else 2 * PANEL - 1):
        rows, ranks, gram_ranks = n - column, 1, 1
        while 2 * gram_ranks <= min(info.max_cluster, 8) and 2 * gram_ranks * batch <= info.multiprocessors and rows > 128 * (2 * gram_ranks - 1):
            gram_ranks *= 2
        larfb_ranks = max(1, min(info.max_cluster, -(-rows // LARFB_ROWS)))
        if 8 < larfb_ranks < 16:
            larfb_ranks = 8
        while rows > BLOCK_ROWS * ranks and ranks < info.max_cluster:
            ranks *= 2
        if rows > BLOCK_ROWS * ranks:
            steps.append(Step(TALL, column, 0, ranks, gram_ranks, larfb_ranks))
        elif ranks == 1:
            steps.append(Step(SINGLE, column, 8 if rows <= 256 else 16, 1, gram_ranks, larfb_ranks))
        else:
            while 2 * ranks <= info.max_cluster and 2 * ranks * batch <= info.multiprocessors and rows > 64 * ranks:
                ranks *= 2
            rows_per_lane = 2
            while 32 * rows_per_lane * ranks < rows:
                rows_per_lane *= 2
            steps.append(Step(CLUSTER, column, rows_per_lane, ranks, gram_ranks, larfb_ranks))
        column += PANEL
    steps.append(Step(WHOLE, column, -(-(n - column) // 32), 1, 0, 0))
    blocks = batch * max(max(step.ranks, -(-(n - step.column) // PANEL) * step.larfb_ranks) for step in steps)
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
#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <cstdio>
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

// Ordinary stores to shared memory, before wgmma and tcgen05 (which read through the asynchronous proxy) may see them.
__device__ __forceinline__ void fence_async_proxy() {
#if __CUDA_ARCH__ >= 900
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
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
__device__ __forceinline__ void cluster_sync() { cluster_arrive(); cluster_wait(); }
template <typename T> __device__ __forceinline__ T* in_rank(T* shared, uint32_t rank) {   // the same place in another block
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
    uint64_t there;
    asm("mapa.u64 %0, %1, %2;" : "=l"(there) : "l"(reinterpret_cast<uint64_t>(shared)), "r"(rank));
    return reinterpret_cast<T*>(there);
#else
    return shared;
#endif
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

// ---------------------------------------------------------------------------------------------------------------------
// Panel input and output, shared by the geqr2 kernels
// ---------------------------------------------------------------------------------------------------------------------
struct PanelArgs {
    const float* src;      // batch x n x n, row-major: A for the first panel, H later
    float* dst;            // batch x n x n: H
    float* tau;            // batch x n
    uint8_t* v_tiles;      // per matrix row_blocks x (high, low) tile images of V, unit diagonal and zeros above written out
    float* t;              // per matrix 64 x 64, row-major: T, upper triangular, zeros written out
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
__device__ __forceinline__ void larft(float* sG, float* sT, float* sX, const float* s_tau, float* t) {
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
    for (int e = threadIdx.x; e < kPanelWidth * kPanelWidth; e += blockDim.x) t[e] = sT[e / kPanelWidth * kTPitch + e % kPanelWidth];
}

// ---------------------------------------------------------------------------------------------------------------------
// geqr2: a panel, or a whole small matrix, in one block's registers
// ---------------------------------------------------------------------------------------------------------------------
// Factors rows and columns col.. of every matrix: W = CW NW columns, at most 32 R rows. Whole matrices (kPanel false):
// writes H and tau. Panels: V tiles and T too.
//
// Decomposition: one block per matrix, warp q owns columns CW q .. CW q + CW - 1 over all rows, lane l rows l, l + 32, ...
// The warps form a chain: a warp applies every reflector of the warps before it, then makes its own CW reflectors without
// leaving its registers, publishing each in a slot of shared memory of its own and arriving on that slot's barrier. Nobody
// ever waits for a reader. Shared memory: 32 R x (W + 4) floats, rows on the way in and out, slots in between.
template <int R, int CW, int NW, bool kPanel> struct Geqr2Shape {
    static constexpr int kColumns = CW * NW, kRows = 32 * R, kThreads = 32 * NW;
    static constexpr int kStageFloats = kRows * (kColumns + 4);
    static constexpr int kSmemBytes = 4 * kStageFloats + 8 * kColumns + 4 * kColumns + (kPanel ? 4 * kPanelWidth * kTPitch : 0);
    static_assert(32 % CW == 0 && kColumns <= kRows && (!kPanel || kColumns == kPanelWidth));
};

template <int R, int CW, int NW, bool kPanel>
__global__ void __launch_bounds__(32 * NW, 1) geqr2_kernel(const PanelArgs p) {
    using Shape = Geqr2Shape<R, CW, NW, kPanel>;
    constexpr int W = Shape::kColumns, M = Shape::kRows, kSegments = (W + 31) / 32;
    extern __shared__ __align__(16) float smem[];
    float* const stage = smem;                                              // M x (W + 4), or W slots of M
    uint64_t* const published = reinterpret_cast<uint64_t*>(smem + Shape::kStageFloats);   // one per column: 32 arrivals
    float* const s_tau = reinterpret_cast<float*>(published + W);
    float* const sG = s_tau + W;
    const long matrix = blockIdx.x;
    if (p.redo && !p.redo[matrix]) return;
    const int lane = threadIdx.x % 32, first = threadIdx.x / 32 * CW;
    const int m = p.n - p.col, w = min(W, m);

    load_rows<W>(stage, p, matrix, 0, m);
    for (int j = threadIdx.x; j < W; j += blockDim.x) { barrier_init(published + j, 32); s_tau[j] = 0; }
    if constexpr (kPanel)
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

    if constexpr (kPanel) {                                                 // G = V^T V, row by row, for T
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
    }
    __syncthreads();                                                        // everyone is done with the slots
#pragma unroll
    for (int r = 0; r < R; ++r)
#pragma unroll
        for (int j = 0; j < CW; j += 4)
            *reinterpret_cast<float4*>(stage + (32 * r + lane) * (W + 4) + first + j) = make_float4(a[r][j], a[r][j + 1], a[r][j + 2], a[r][j + 3]);
    for (int j = threadIdx.x; j < w; j += blockDim.x) p.tau[matrix * p.n + p.col + j] = s_tau[j];
    __syncthreads();
    store_rows<W>(stage, p, matrix, 0, m);
    if constexpr (kPanel) {
        store_v_tiles(stage, p, matrix, 0, m);
        __syncthreads();
        larft(sG, stage, stage + kPanelWidth * kTPitch, s_tau, p.t + matrix * kPanelWidth * kPanelWidth);
    }
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
                                      + 4 * 2 * kPanelWidth + 4 * kPanelWidth * kTPitch;
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
    float* const sG = s_alpha + W;
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
#pragma unroll
    for (int r = 0; r < R; ++r)
        *reinterpret_cast<float4*>(stage + (32 * r + lane) * (W + 4) + first) = make_float4(a[r][0], a[r][1], a[r][2], a[r][3]);
    if (rank == 0)
        for (int j = threadIdx.x; j < w; j += blockDim.x) p.tau[matrix * p.n + p.col + j] = s_tau[j];
    __syncthreads();
    store_rows<W>(stage, p, matrix, row0, rows);
    if (rows > 0) store_v_tiles(stage, p, matrix, row0, rows);
    __syncthreads();
    if (rank == 0) larft(sG, stage, stage + W * kTPitch, s_tau, p.t + matrix * kPanelWidth * kPanelWidth);
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
    if (src != dst)
        for (int i = row0 + warp; i < row1; i += kWarps) {
            const long at = static_cast<long>(i) * p.n;
            dst[at] = src[at];
            dst[at + 1] = src[at + 1];
        }
    // total = f summed over the rows (kSum) or its maximum; each lane brings its two columns' values, `row` goes along
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
    if (rank == 0 && threadIdx.x < W) p.tau[matrix * p.n + p.col + threadIdx.x] = s_tau[threadIdx.x];
    PanelArgs finished = p;
    finished.src = p.dst;
    for (int i = row0; i < row1; i += 64) {
        load_rows<W>(stage, finished, matrix, i, min(64, row1 - i));
        __syncthreads();
        store_v_tiles(stage, p, matrix, i, min(64, row1 - i));
        __syncthreads();
    }
    if (rank == 0) larft(sG, stage, stage + W * kTPitch, s_tau, p.t + matrix * W * W);
}

// ---------------------------------------------------------------------------------------------------------------------
// Products of 64-column tiles in three instruction sets
// ---------------------------------------------------------------------------------------------------------------------
// Each backend multiplies a 128-row operand A by an operand B of 64 columns, K = 64, for 256 threads: warps 0-3 and 4-7
// take (for mma and wgmma) rows 0-63 and 64-127 of the result. Operands are pairs of high and low tile images; a product is
// high high + high low + low high in float32, dropping low low (2^-16 of each term). Interface:
//   Result             float pairs: [n8 block][row half]; warp rows start at row_of_warp(), lane l has rows l / 4 (+ 8),
//                      columns 8 block + 2 (l % 4), + 1
//   reset()            says that the registers of the result are free until the next start
//   start(a, b, clear) begins result (+)= op(A) op(B); finish<pending>() waits until at most `pending` of the started
//                      products still run; read(result) fetches it after finish<0>
// Forms: kAtB: A given as 64 x 128 (two tiles side by side), B as 64 x 64. kAB: A 128 x 64, B 64 x 64. kABt: B as its
// transpose. A's two tiles follow each other; the low tiles follow kALow and kBLow bytes after the high ones.
//   start_split(a, b, clear)  begins A^T B for each warpgroup's own 64 x 64 A and B (tiles side by side), into the result of
//                      read_group
//   start_exact<form>(a, b), finish_exact()  a warpgroup's own product of 64 x 64 operands, each high + mid + low (three tiles):
//                      all products but mid low and low low, as good as float32. The warpgroups need not meet.
//   read_group(result) rows 16 (warp % 4) of the warpgroup's own product
enum class Form { kAtB, kAB, kABt };

struct Fragment { float2 v[8][2]; };

struct MmaSync {
    Fragment sum;
    static constexpr int kTmemColumns = 0;
    static constexpr bool kAsync = false;
    __device__ __forceinline__ static int row_of_warp() { return threadIdx.x / 32 * 16; }
    __device__ MmaSync(uint64_t*, uint32_t*) {}
    __device__ __forceinline__ static void load(uint32_t (&f)[4], const uint8_t* tile, int row, int column, bool transposed) {
        const uint32_t at = smem_address(tile + tile_offset(row, column));
        if (transposed) asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                                     : "=r"(f[0]), "=r"(f[1]), "=r"(f[2]), "=r"(f[3]) : "r"(at) : "memory");
        else asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                          : "=r"(f[0]), "=r"(f[1]), "=r"(f[2]), "=r"(f[3]) : "r"(at) : "memory");
    }
    __device__ __forceinline__ static void multiply(float2 (&c)[2], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
        asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                     : "+f"(c[0].x), "+f"(c[0].y), "+f"(c[1].x), "+f"(c[1].y) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
    }
    template <Form kForm> __device__ __forceinline__ void one(const uint8_t* a, const uint8_t* b) {
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
    __device__ __forceinline__ void reset() {
#pragma unroll
        for (int i = 0; i < 16; ++i) sum.v[i / 2][i % 2] = make_float2(0, 0);
    }
    template <Form kForm, int kALow, int kBLow>
    __device__ __forceinline__ void start(const uint8_t* a, const uint8_t* b, bool clear) {
        a += threadIdx.x / 128 * kTileBytes;
        if (clear) reset();
        one<kForm>(a + kALow, b);
        one<kForm>(a, b + kBLow);
        one<kForm>(a, b);
    }
    template <int kALow, int kBLow> __device__ __forceinline__ void start_split(const uint8_t* a, const uint8_t* b, bool clear) {
        start<Form::kAtB, kALow, kBLow>(a, b + threadIdx.x / 128 * kTileBytes, clear);
    }
    template <Form kForm> __device__ __forceinline__ void start_exact(const uint8_t* a, const uint8_t* b) {
        reset();
        one<kForm>(a + 2 * kTileBytes, b);
        one<kForm>(a, b + 2 * kTileBytes);
        one<kForm>(a + kTileBytes, b + kTileBytes);
        one<kForm>(a + kTileBytes, b);
        one<kForm>(a, b + kTileBytes);
        one<kForm>(a, b);
    }
    template <int kPending> __device__ __forceinline__ void finish() {}
    __device__ __forceinline__ void finish_exact() {}
    __device__ __forceinline__ void read(Fragment& f) { f = sum; }
    __device__ __forceinline__ void read_group(Fragment& f) { f = sum; }
    __device__ __forceinline__ void close() {}
};

#if defined(KITTENS_HOPPER) || defined(KITTENS_BLACKWELL)
template <int kRows, int kColumns = 64> using Tile = kittens::st_bf<kRows, kColumns>;
template <typename T> __device__ __forceinline__ const T& tile_at(const uint8_t* p) { return *reinterpret_cast<const T*>(p); }
#endif

#if defined(KITTENS_HOPPER)
struct Wgmma {
    using Sum = kittens::rt_fl<16, 64>;
    Sum sum;
    static constexpr int kTmemColumns = 0;
    static constexpr bool kAsync = true;
    __device__ __forceinline__ static int row_of_warp() { return threadIdx.x / 32 * 16; }
    __device__ Wgmma(uint64_t*, uint32_t*) {}
    __device__ __forceinline__ void reset() { kittens::warp::zero(sum); }
    template <Form kForm, bool kClear> __device__ __forceinline__ void one(const uint8_t* a, const uint8_t* b) {
        using T = Tile<64>;
        using Group = kittens::warpgroup;
        const T &A = tile_at<T>(a), &B = tile_at<T>(b);
        if constexpr (kForm == Form::kAtB) Group::template mma_AtB<Sum, T, T, 0, !kClear>(sum, A, B);
        else if constexpr (kForm == Form::kAB) Group::template mma_AB<Sum, T, T, 0, !kClear>(sum, A, B);
        else Group::template mma_ABt<Sum, T, T, 0, !kClear>(sum, A, B);
    }
    template <Form kForm, int kALow, int kBLow>
    __device__ __forceinline__ void start(const uint8_t* a, const uint8_t* b, bool clear) {
        a += threadIdx.x / 128 * kTileBytes;
        kittens::warpgroup::mma_fence(sum);
        if (clear) one<kForm, true>(a + kALow, b);
        else one<kForm, false>(a + kALow, b);
        one<kForm, false>(a, b + kBLow);
        one<kForm, false>(a, b);
    }
    template <int kALow, int kBLow> __device__ __forceinline__ void start_split(const uint8_t* a, const uint8_t* b, bool clear) {
        start<Form::kAtB, kALow, kBLow>(a, b + threadIdx.x / 128 * kTileBytes, clear);
    }
    template <Form kForm> __device__ __forceinline__ void start_exact(const uint8_t* a, const uint8_t* b) {
        reset();
        kittens::warpgroup::mma_fence(sum);
        one<kForm, true>(a + 2 * kTileBytes, b);
        one<kForm, false>(a, b + 2 * kTileBytes);
        one<kForm, false>(a + kTileBytes, b + kTileBytes);
        one<kForm, false>(a + kTileBytes, b);
        one<kForm, false>(a, b + kTileBytes);
        one<kForm, false>(a, b);
    }
    // Each start commits three groups (start_exact six, and only finish<0> follows it).
    template <int kPending> __device__ __forceinline__ void finish() { kittens::warpgroup::mma_async_wait<3 * kPending>(); }
    __device__ __forceinline__ void finish_exact() { finish<0>(); }
    __device__ __forceinline__ void read(Fragment& f) {
        kittens::warpgroup::mma_fence(sum);
#pragma unroll
        for (int b = 0; b < 8; ++b)
#pragma unroll
            for (int half = 0; half < 2; ++half) f.v[b][half] = sum.tiles[0][b / 2].data[b % 2 * 2 + half];
    }
    __device__ __forceinline__ void read_group(Fragment& f) { read(f); }
    __device__ __forceinline__ void close() {}
};
#endif

#if defined(KITTENS_BLACKWELL)
// The accumulator lives in 64 columns of tensor memory; thread 0 issues for the block. A commit per product arrives on one
// of two barriers in turn, so that the previous product can be waited for while the next one runs.
struct Tcgen05 {
    using Sum = kittens::tt<float, 128, 64>;
    using GroupSum = kittens::tt<float, 64, 64>;
    kittens::tensor_allocator<2, 1, false> memory;
    Sum sum;
    GroupSum group_sum[2];                                                     // lanes 0-15 and 16-31 of every quarter
    kittens::semaphore* done;                                               // [2]: the block's; [2 + g]: warpgroup g's
    int exact = 0;                                                         // products of start_exact waited for
    static constexpr int kTmemColumns = 64;
    static constexpr bool kAsync = true;
    int started = 0, waited = 0;
    __device__ __forceinline__ static int row_of_warp() { return 32 * (threadIdx.x / 32 % 4) + 16 * (threadIdx.x / 128); }
    __device__ Tcgen05(uint64_t* barriers, uint32_t* slot) : done(reinterpret_cast<kittens::semaphore*>(barriers)) {
        if (threadIdx.x == 0)
            for (int i = 0; i < 4; ++i) kittens::init_semaphore(done[i], 0, 1);
        if (threadIdx.x / 32 == 0) memory.provision(*slot);
        asm volatile("tcgen05.fence::before_thread_sync;" ::: "memory");
        __syncthreads();
        asm volatile("tcgen05.fence::after_thread_sync;" ::: "memory");
        memory.set_addr(*slot);
        sum = memory.template allocate<Sum>(0);
        for (int g = 0; g < 2; ++g) group_sum[g] = memory.template allocate<GroupSum>(g, 64);
    }
    template <Form kForm, int kALow, int kBLow>
    __device__ __forceinline__ void start(const uint8_t* a, const uint8_t* b, bool clear) {
        if (threadIdx.x == 0) {
            asm volatile("tcgen05.fence::after_thread_sync;" ::: "memory");
            if (clear) one<kForm, true>(a + kALow, b);
            else one<kForm, false>(a + kALow, b);
            one<kForm, false>(a, b + kBLow);
            one<kForm, false>(a, b);
            kittens::tensor_commit<1>(done[started & 1]);
        }
        ++started;
    }
    __device__ __forceinline__ void reset() {}
    template <Form kForm, bool kClear> __device__ __forceinline__ void one_group(int g, const uint8_t* a, const uint8_t* b) {
        GroupSum d(g ? group_sum[1].addr : group_sum[0].addr);
        kittens::mma<kForm == Form::kAtB, kForm == Form::kABt, GroupSum, Tile<64>, Tile<64>, !kClear>(d, tile_at<Tile<64>>(a), tile_at<Tile<64>>(b));
    }
    template <int kALow, int kBLow> __device__ __forceinline__ void start_split(const uint8_t* a, const uint8_t* b, bool clear) {
        if (threadIdx.x == 0) {
            asm volatile("tcgen05.fence::after_thread_sync;" ::: "memory");
            for (int g = 0; g < 2; ++g, a += kTileBytes, b += kTileBytes) {
                if (clear) one_group<Form::kAtB, true>(g, a + kALow, b);
                else one_group<Form::kAtB, false>(g, a + kALow, b);
                one_group<Form::kAtB, false>(g, a, b + kBLow);
                one_group<Form::kAtB, false>(g, a, b);
            }
            kittens::tensor_commit<1>(done[started & 1]);
        }
        ++started;
    }
    template <Form kForm> __device__ __forceinline__ void start_exact(const uint8_t* a, const uint8_t* b) {
        if (threadIdx.x % 128 == 0) {
            const int g = threadIdx.x / 128;
            asm volatile("tcgen05.fence::after_thread_sync;" ::: "memory");
            one_group<kForm, true>(g, a + 2 * kTileBytes, b);
            one_group<kForm, false>(g, a, b + 2 * kTileBytes);
            one_group<kForm, false>(g, a + kTileBytes, b + kTileBytes);
            one_group<kForm, false>(g, a + kTileBytes, b);
            one_group<kForm, false>(g, a, b + kTileBytes);
            one_group<kForm, false>(g, a, b);
            kittens::tensor_commit<1>(done[2 + g]);
        }
    }
    __device__ __forceinline__ void finish_exact() {
        kittens::wait(done[2 + threadIdx.x / 128], exact & 1);
        ++exact;
    }
    template <Form kForm, bool kClear> __device__ __forceinline__ void one(const uint8_t* a, const uint8_t* b) {
        using A = std::conditional_t<kForm == Form::kAtB, Tile<64, 128>, Tile<128>>;
        using B = Tile<64>;
        constexpr int trans_a = kForm == Form::kAtB, trans_b = kForm == Form::kABt;
        kittens::mma<trans_a, trans_b, Sum, A, B, !kClear>(sum, tile_at<A>(a), tile_at<B>(b));
    }
    template <int kPending> __device__ __forceinline__ void finish() {
        for (; waited < started - kPending; ++waited) kittens::wait(done[waited & 1], waited >> 1 & 1);
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
    __device__ __forceinline__ void read_group(Fragment& f) {
        fetch(f, [&](auto& t) { kittens::warpgroup::load_async(t, GroupSum(threadIdx.x < 128 ? group_sum[0].addr : group_sum[1].addr)); });
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
// factors: T V_top^T R = -U. (Ballard, Demmel, Grigori, Jacquelin, Knight, Nguyen, "Reconstructing Householder vectors from
// tall-skinny QR", 2015.) tau is 2 / |v|^2 of the v that was stored, so that each reflector is orthogonal to rounding.
//
// Nearly dependent columns show as growth = max |(U^-1)_ij| |p_i|: the panel's residual is near 3 growth^2 eps. Past
// kGrowthLimit, or where (next to) nothing lies below a diagonal entry (LAPACK wants tau = 0 there), or where G left the
// safe range, the kernel leaves the panel as it is and sets redo for the column-by-column kernels. Exact for each matrix.
//
// Decomposition: a cluster of blocks per matrix (one block where a matrix has enough), 256 threads, rows dealt in slabs of
// 128; every block runs the small recurrence for itself. Rows are read twice, once for G and once for V.
constexpr float kGrowthLimit = 6.0f, kTailFloor = 1e-3f;
constexpr int kGramThreads = 256, kPitch = 68, kGramMatrixBytes = 4 * 64 * kPitch;   // 64 x 64 float32 matrices, rows 16-byte aligned
struct GramShared {                                                         // byte offsets; six 64 x 64 matrices, then small things
    static constexpr int kMatrix = kGramMatrixBytes;
    static constexpr int kU = 0, kZ = kMatrix;                              // U and (V_top^T R)^-1; before them tiles of P, after them of V
    static constexpr int kM = 2 * kMatrix;                                  // G summed over the cluster; V_top^T R; U^-1 (high, low)
    static constexpr int kY = 3 * kMatrix;                                  // U^-1
    static constexpr int kR = 4 * kMatrix;                                  // G, then R
    static constexpr int kVt = 5 * kMatrix;                                 // P_top, then V_top^T
    static constexpr int kRows = 6 * kMatrix;                               // 2 x (2 rows of G, 2 rows and columns of P_top)
    static constexpr int kNorm = kRows + 4 * 12 * 64;                        // |p_i|, 1 / U_ii, 1 / R_ii
    static constexpr int kMail = kNorm + 4 * 3 * 64;                        // per rank: sums of squares of V's columns
    static constexpr int kBarriers = kMail + 4 * kMaxCluster * 64;
    static constexpr int kBytes = kBarriers + 64;
    static_assert(kMatrix % 1024 == 0, "swizzled tiles start on 1024 bytes");
    static_assert(2 * kTripleBytes <= 3 * kMatrix && 2 * kPairBytes <= 2 * kMatrix && kPairBytes <= kMatrix);
    static_assert(2 * (kBytes + 1024) <= 228 * 1024, "two blocks per multiprocessor");
};
__device__ __forceinline__ float rcp_newton(float x) {
    float q;
    asm("rcp.approx.f32 %0, %1;" : "=f"(q) : "f"(x));
    return fmaf(q, fmaf(-x, q, 1.0f), q);
}
// The 64 steps on G and P_top, two at a time. 16 x 16 threads; thread (ty, tx) keeps entries (ty + 16 a, tx + 16 b) of both in
// registers. The owners of rows k and l = k + 1 (and of those columns of P_top) publish them, one barrier, then everyone
// works out the two steps' rows and columns for itself and applies its part of the rank-2 updates. The long chain is two
// reciprocal square roots and two reciprocals. Leaves R, V_top^T and U, zeros and ones written out, 1 / U_kk and 1 / R_kk.
// False: a guard failed.
struct GramStep { float minus_inv_beta, pivot, inv; };
__device__ __forceinline__ GramStep gram_step(float square, float alpha, bool& good) {
    good = good && square > 1e-28f && square < 1e30f && fmaf(-alpha, alpha, square) > kTailFloor * square;
    float rs;
    asm("rsqrt.approx.f32 %0, %1;" : "=f"(rs) : "f"(square));
    rs = fmaf(0.5f * rs, fmaf(-square * rs, rs, 1.0f), rs);
    GramStep h;
    h.minus_inv_beta = copysignf(rs, alpha);
    h.pivot = fmaf(h.minus_inv_beta, square, alpha);                        // alpha - beta
    h.inv = rcp_newton(h.pivot);
    return h;
}
__device__ __forceinline__ void load4(float (&x)[4], const float* from) {
    const float4 v = *reinterpret_cast<const float4*>(from);
    x[0] = v.x; x[1] = v.y; x[2] = v.z; x[3] = v.w;
}
__device__ __forceinline__ void store4(float* to, const float (&x)[4]) { *reinterpret_cast<float4*>(to) = make_float4(x[0], x[1], x[2], x[3]); }

__device__ __forceinline__ bool gram_factor(const float* gram, const float* sP, float* sRows, float* sR, float* sVt, float* sU, float* s_inv_u, float* s_inv_r) {
    constexpr int T = 16, A = 4;
    const int tx = threadIdx.x % T, ty = threadIdx.x / T;
    // Published, twice: rows k, l of G, rows k, l of P_top, columns k, l of P_top; as [T][A], a thread's values adjacent.
    constexpr int kG = 0, kRow = 128, kColumn = 256, kBuffer = 384;
    float g[A][A], t[A][A];
    bool good = true;
#pragma unroll
    for (int a = 0; a < A; ++a)
#pragma unroll
        for (int b = 0; b < A; ++b) {
            const int i = ty + T * a, j = tx + T * b;
            g[a][b] = gram[min(i, j) * kPitch + max(i, j)];
            t[a][b] = sP[i * kPitch + j];
        }
    auto publish = [&](float* buffer, int at, const float (&g_row)[A], const float (&t_row)[A], const float (&t_column)[A]) {
        if (ty / 2 * 2 == at) {
            store4(buffer + kG + (ty & 1) * 64 + tx * A, g_row);
            store4(buffer + kRow + (ty & 1) * 64 + tx * A, t_row);
        }
        if (tx / 2 * 2 == at) store4(buffer + kColumn + (tx & 1) * 64 + ty * A, t_column);
    };
    {
        const float t_column[A] = {t[0][0], t[1][0], t[2][0], t[3][0]};
        publish(sRows, 0, g[0], t[0], t_column);
    }
    __syncthreads();
    float* now = sRows;
    float* next = sRows + kBuffer;
#pragma unroll
    for (int ka = 0; ka < A; ++ka) {                                        // k = 16 ka + kk: register indices stay constants
#pragma unroll 1
        for (int kk = 0; kk < T; kk += 2) {
            const int k = kk * A + ka, l = k + A;                           // places of k and l in a published vector
            const float gkl = now[kG + l], tkl = now[kRow + l], tlk = now[kColumn + l];
            const GramStep hk = gram_step(now[kG + k], now[kRow + k], good);
            const float rkl = -gkl * hk.minus_inv_beta, ukl = tkl - rkl, vlk = tlk * hk.inv;
            const GramStep hl = gram_step(fmaf(-rkl, rkl, now[kG + 64 + l]), fmaf(-vlk, ukl, now[kRow + 64 + l]), good);
            float rk_j[A], rl_j[A], uk_j[A], ul_j[A], rk_i[A], rl_i[A], vk_i[A], vl_i[A];
            load4(rk_j, now + kG + tx * A);
            load4(rl_j, now + kG + 64 + tx * A);
            load4(uk_j, now + kRow + tx * A);
            load4(ul_j, now + kRow + 64 + tx * A);
            load4(rk_i, now + kG + ty * A);                                 // G is symmetric: its rows serve as columns
            load4(rl_i, now + kG + 64 + ty * A);
            load4(vk_i, now + kColumn + ty * A);
            load4(vl_i, now + kColumn + 64 + ty * A);
#pragma unroll
            for (int b = ka; b < A; ++b) {
                rk_j[b] *= -hk.minus_inv_beta;
                uk_j[b] -= rk_j[b];
                rl_j[b] = fmaf(-rkl, rk_j[b], rl_j[b]) * -hl.minus_inv_beta;
                ul_j[b] = fmaf(-vlk, uk_j[b], ul_j[b]) - rl_j[b];
                rk_i[b] *= -hk.minus_inv_beta;
                vk_i[b] *= hk.inv;
                rl_i[b] = fmaf(-rkl, rk_i[b], rl_i[b]) * -hl.minus_inv_beta;
                vl_i[b] = fmaf(-vk_i[b], ukl, vl_i[b]) * hl.inv;
            }
#pragma unroll
            for (int a = ka; a < A; ++a) {
                const bool below = a > ka || ty > kk + 1;
                const float rk = below ? rk_i[a] : 0.0f, rl = below ? rl_i[a] : 0.0f, vk = below ? vk_i[a] : 0.0f, vl = below ? vl_i[a] : 0.0f;
#pragma unroll
                for (int b = ka; b < A; ++b)
                    if (b > ka || tx > kk + 1) {
                        g[a][b] = fmaf(-rl, rl_j[b], fmaf(-rk, rk_j[b], g[a][b]));
                        t[a][b] = fmaf(-vl, ul_j[b], fmaf(-vk, uk_j[b], t[a][b]));
                    }
            }
            if (ty / 2 * 2 == kk) {                                         // rows k and l are finished
                const bool odd = ty & 1;
#pragma unroll
                for (int b = ka; b < A; ++b)
                    if (b > ka || tx >= ty) {
                        g[ka][b] = odd ? rl_j[b] : rk_j[b];
                        t[ka][b] = b == ka && tx == ty ? (odd ? hl.pivot : hk.pivot) : odd ? ul_j[b] : uk_j[b];
                    }
                if (tx == ty) {
                    s_inv_u[T * ka + ty] = odd ? hl.inv : hk.inv;
                    s_inv_r[T * ka + ty] = -(odd ? hl.minus_inv_beta : hk.minus_inv_beta);
                }
            }
            if (tx / 2 * 2 == kk)                                           // and their columns of V_top
#pragma unroll
                for (int a = ka; a < A; ++a)
                    if (a > ka || ty > tx) t[a][ka] = tx & 1 ? vl_i[a] : vk_i[a];
            const bool wrap = kk + 2 == T;
            if (!wrap || ka + 1 < A) {
                const int up = ka + 1 < A ? ka + 1 : ka;
                float g_row[A], t_row[A], t_column[A];
#pragma unroll
                for (int b = 0; b < A; ++b) {
                    g_row[b] = wrap ? g[up][b] : g[ka][b];
                    t_row[b] = wrap ? t[up][b] : t[ka][b];
                    t_column[b] = wrap ? t[b][up] : t[b][ka];
                }
                publish(next, wrap ? 0 : kk + 2, g_row, t_row, t_column);
            }
            float* const swap = now;
            now = next;
            next = swap;
            __syncthreads();
        }
    }
#pragma unroll
    for (int a = 0; a < A; ++a)
#pragma unroll
        for (int b = 0; b < A; ++b) {
            const int i = ty + T * a, j = tx + T * b;
            sR[i * kPitch + j] = j >= i ? g[a][b] : 0.0f;
            sU[i * kPitch + j] = j >= i ? t[a][b] : 0.0f;
            sVt[j * kPitch + i] = j < i ? t[a][b] : j == i ? 1.0f : 0.0f;
        }
    return good;
}

// acc += A[i .. i + 1][k0 .. k1) B[k0 .. k1)[j .. j + 3]: row-major, pitches kPitch and kBPitch, k0 and k1 multiples of 4.
template <int kBPitch> __device__ __forceinline__ void small_product(float (&acc)[2][4], const float* A, const float* B, int i, int j, int k0, int k1) {
#pragma unroll 2
    for (int k = k0; k < k1; k += 4) {
        const float4 a0 = *reinterpret_cast<const float4*>(A + i * kPitch + k), a1 = *reinterpret_cast<const float4*>(A + (i + 1) * kPitch + k);
        const float a_[2][4] = {{a0.x, a0.y, a0.z, a0.w}, {a1.x, a1.y, a1.z, a1.w}};
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            const float4 b = *reinterpret_cast<const float4*>(B + (k + e) * kBPitch + j);
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                acc[r][0] = fmaf(a_[r][e], b.x, acc[r][0]);
                acc[r][1] = fmaf(a_[r][e], b.y, acc[r][1]);
                acc[r][2] = fmaf(a_[r][e], b.z, acc[r][2]);
                acc[r][3] = fmaf(a_[r][e], b.w, acc[r][3]);
            }
        }
    }
}

// Y = U^-1 for `count` upper triangular 64 x 64 matrices (U, inv and Y of matrix 1 lie u1, inv1, y1 floats after matrix 0's):
// 16 x 16 diagonal blocks by substitution, then [Y1, -Y1 U12 Y2; 0, Y2] twice. U12 Y2 waits in Y's lower left, which is
// not otherwise used. Whole block; ends with a barrier.
__device__ __forceinline__ void invert_upper(const float* U, const float* inv, float* Y, int count, int u1, int inv1, int y1) {
    const int tid = threadIdx.x;
    if (tid < 64 * count) {                                                 // row i of block d: x U_dd = e_i
        const int which = tid / 64, d = tid % 64 / 16 * 16, i = tid % 16;
        const float* const block = U + which * u1 + d * kPitch + d;
        float x[16];
#pragma unroll
        for (int j = 0; j < 16; ++j) {
            float s = j == i ? 1.0f : 0.0f;
#pragma unroll
            for (int l = 0; l < j; ++l) s = fmaf(-x[l], block[l * kPitch + j], s);
            x[j] = s * inv[which * inv1 + d + j];
        }
        float* const to = Y + which * y1 + (d + i) * kPitch + d;
#pragma unroll
        for (int j = 0; j < 16; j += 4) *reinterpret_cast<float4*>(to + j) = make_float4(x[j], x[j + 1], x[j + 2], x[j + 3]);
    }
    __syncthreads();
#pragma unroll 1
    for (int s = 16; s < 64; s *= 2)
#pragma unroll 1
        for (int side = 0; side < 2; ++side) {                              // 0: X = U12 Y2; 1: Y12 = -Y1 X
            const int tiles = 4 * s, which = tid / tiles, tile = tid % tiles, per = s * s / 8;   // 32 / s pairs of s x s / 8 tiles
            if (which < count) {
                const int b = tile / per * 2 * s, i = tile % per / (s / 4) * 2, j = tile % (s / 4) * 4;
                const float* const u = U + which * u1;
                float* const y = Y + which * y1;
                float acc[2][4] = {};
                if (side == 0) small_product<kPitch>(acc, u + b * kPitch + b + s, y + (b + s) * kPitch + b + s, i, j, 0, j + 4);
                else small_product<kPitch>(acc, y + b * kPitch + b, y + (b + s) * kPitch + b, i, j, i / 4 * 4, s);
#pragma unroll
                for (int r = 0; r < 2; ++r) {
                    float* const to = y + (side ? (b + i + r) * kPitch + b + s + j : (b + s + i + r) * kPitch + b + j);
                    const float sign = side ? -1.0f : 1.0f;
                    *reinterpret_cast<float4*>(to) = make_float4(sign * acc[r][0], sign * acc[r][1], sign * acc[r][2], sign * acc[r][3]);
                }
            }
            __syncthreads();
        }
}

// A thread's sixteenth of the upper triangle of M, zeros below; and its place in three tiles.
__device__ __forceinline__ void load_upper(float4 (&x)[4], const float* M) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
        const int i = threadIdx.x / 16 + 16 * e, j = threadIdx.x % 16 * 4;
        x[e] = *reinterpret_cast<const float4*>(M + i * kPitch + j);
        x[e] = make_float4(j >= i ? x[e].x : 0.0f, j + 1 >= i ? x[e].y : 0.0f, j + 2 >= i ? x[e].z : 0.0f, j + 3 >= i ? x[e].w : 0.0f);
    }
}
__device__ __forceinline__ void store_triple(float4 (&x)[4], uint8_t* triple) {
#pragma unroll
    for (int e = 0; e < 4; ++e)
#pragma unroll
        for (int t = 0; t < 3; ++t)
            *reinterpret_cast<uint2*>(triple + t * kTileBytes + tile_offset(threadIdx.x / 16 + 16 * e, threadIdx.x % 16 * 4))
                = make_uint2(take_bf16(x[e].x, x[e].y), take_bf16(x[e].z, x[e].w));
}

template <class Product, bool kAligned>
__global__ void __launch_bounds__(kGramThreads, 2) gram_panel_kernel(const PanelArgs p) {
    using S = GramShared;
    extern __shared__ __align__(1024) uint8_t shared[];
    const auto matrix_at = [&](int offset) { return reinterpret_cast<float*>(shared + offset); };
    float* const sU = matrix_at(S::kU);
    float* const sY = matrix_at(S::kY);
    float* const sZ = matrix_at(S::kZ);
    float* const sM = matrix_at(S::kM);
    float* const sR = matrix_at(S::kR);
    float* const sVt = matrix_at(S::kVt);
    float* const s_norm = reinterpret_cast<float*>(shared + S::kNorm);
    float* const s_inv_u = s_norm + 64;
    float* const s_inv_r = s_norm + 128;
    float* const mail = reinterpret_cast<float*>(shared + S::kMail);
    uint64_t* const barriers = reinterpret_cast<uint64_t*>(shared + S::kBarriers);
    Product product(barriers, reinterpret_cast<uint32_t*>(barriers + 4));
    uint32_t rank = 0, ranks = 1;
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    asm("mov.u32 %0, %%cluster_nctarank;" : "=r"(ranks));
#endif
    const long matrix = blockIdx.x / ranks;
    const int tid = threadIdx.x, lane = tid % 32, warp = tid / 32, group = tid / 128, in_group = tid % 128;
    const int m = p.n - p.col, slabs = (m + 127) / 128, slab0 = slabs * rank / ranks, slab1 = slabs * (rank + 1) / ranks;
    const float* const src = p.src + (matrix * p.n + p.col) * p.n + p.col;
    float* const dst = p.dst + (matrix * p.n + p.col) * p.n + p.col;

    // A warpgroup's 64 rows of a slab: a thread has 4 neighbouring columns of 8 rows.
    const int c4 = in_group % 16 * 4, c_row = in_group / 16;
    float4 x[8];
    auto fetch = [&](int slab) {
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            const int row = 128 * slab + 64 * group + c_row + 8 * i;
            const float* const at = src + (static_cast<long>(row) * p.n + c4);
            x[i] = make_float4(0, 0, 0, 0);
            if (row < m) x[i] = kAligned ? *reinterpret_cast<const float4*>(at) : make_float4(at[0], at[1], at[2], at[3]);
        }
    };
    fetch(slab0);
    for (int e = tid; e < 64 * 64; e += kGramThreads) copy_async_4(sVt + e / 64 * kPitch + e % 64, src + static_cast<long>(e / 64) * p.n + e % 64);
    copy_async_commit();

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
        product.finish_exact();
        product.read_group(f);
#pragma unroll
        for (int b = 0; b < 8; ++b)
#pragma unroll
            for (int half = 0; half < 2; ++half) { sum[b][half].x += f.v[b][half].x; sum[b][half].y += f.v[b][half].y; }
        if (!Product::kAsync && slab + 1 < slab1) fetch(slab + 1);
        group_sync(group);
    }
    __syncthreads();
    const int f_row = lane / 4, f_column = lane % 4 * 2, group_row = warp % 4 * 16 + f_row, my_row = Product::row_of_warp() + f_row;
    for (int g = 0; g < 2; ++g) {                                           // the two warpgroups' sums, in order
        if (g == group)
#pragma unroll
            for (int b = 0; b < 8; ++b)
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    float2* const to = reinterpret_cast<float2*>(sR + (group_row + 8 * half) * kPitch + 8 * b + f_column);
                    const float2 old = g ? *to : make_float2(0, 0);
                    *to = make_float2(old.x + sum[b][half].x, old.y + sum[b][half].y);
                }
        if (g == 0) __syncthreads();
    }
    copy_async_wait<0>();
    __syncthreads();
    const float* gram = sR;
    if (ranks > 1) {                                                        // each rank adds up its share of rows and gives it to all
        cluster_sync();
        for (int e = tid; e < 1024 / static_cast<int>(ranks); e += kGramThreads) {
            const int at = (rank * (64 / ranks) + e / 16) * kPitch + e % 16 * 4;
            float4 t = make_float4(0, 0, 0, 0);
#pragma unroll 4
            for (uint32_t q = 0; q < ranks; ++q) {
                const float4 y = *reinterpret_cast<const float4*>(in_rank(sR, q) + at);
                t = make_float4(t.x + y.x, t.y + y.y, t.z + y.z, t.w + y.w);
            }
            for (uint32_t q = 0; q < ranks; ++q) *reinterpret_cast<float4*>(in_rank(sM, q) + at) = t;
        }
        cluster_sync();
        gram = sM;
    }
    if (tid < 64) s_norm[tid] = sqrtf(gram[tid * kPitch + tid]);

    bool good = gram_factor(gram, sVt, reinterpret_cast<float*>(shared + S::kRows), sR, sVt, sU, s_inv_u, s_inv_r);
    __syncthreads();
    const bool makes_t = rank == 0;
    // Result of two upper triangles' product, in the first warpgroup's f; the operands' tiles may take the factors' place.
    auto multiply = [&](const float* A, const float* B, uint8_t* tiles) {
        float4 a[4], b[4];
        load_upper(a, A);
        load_upper(b, B);
        __syncthreads();
        store_triple(a, tiles);
        store_triple(b, tiles + kTripleBytes);
        fence_async_proxy();
        __syncthreads();
        if (group == 0) {
            product.template start_exact<Form::kAB>(tiles, tiles + kTripleBytes);
            product.finish_exact();
            product.read_group(f);
        }
    };
    if (makes_t) {                                                          // M = V_top^T R
        multiply(sVt, sR, shared + S::kZ);
        __syncthreads();
        if (group == 0)
#pragma unroll
            for (int half = 0; half < 2; ++half)
#pragma unroll
                for (int b = 0; b < 8; ++b)
                    *reinterpret_cast<float2*>(sM + (group_row + 8 * half) * kPitch + 8 * b + f_column) = f.v[b][half];
        __syncthreads();
    }
    invert_upper(sU, s_inv_u, sY, makes_t ? 2 : 1, (S::kM - S::kU) / 4, 64, (S::kZ - S::kY) / 4);   // Z = M^-1: M_ii = R_ii
    if (makes_t) {                                                          // T = -U Z
        multiply(sU, sZ, shared);
        if (group == 0)
#pragma unroll
            for (int half = 0; half < 2; ++half)
#pragma unroll
                for (int b = 0; b < 8; ++b) {
                    const int i = group_row + 8 * half, j = 8 * b + f_column;
                    *reinterpret_cast<float2*>(p.t + (matrix * kPanelWidth + i) * kPanelWidth + j)
                        = make_float2(j >= i ? -f.v[b][half].x : 0.0f, j + 1 >= i ? -f.v[b][half].y : 0.0f);
                }
        __syncthreads();
    }
    // U^-1 split, and its growth. Its columns change places so that the result's fragments hold four neighbouring columns of
    // V: the product's column 8 b + 2 t + e is V's column 16 (b / 2) + 4 t + 2 (b % 2) + e.
#pragma unroll 1
    for (int e = tid; e < 1024; e += kGramThreads) {
        const int i = e / 16, j = e % 16 * 4;
        const float4 y = *reinterpret_cast<const float4*>(sY + i * kPitch + j);
        const float y_[4] = {j >= i ? y.x : 0.0f, j + 1 >= i ? y.y : 0.0f, j + 2 >= i ? y.z : 0.0f, j + 3 >= i ? y.w : 0.0f};
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            uint32_t high, low;
            split_bf16(y_[2 * h], y_[2 * h + 1], high, low);
            const int at = tile_offset(i, j / 16 * 16 + 8 * h + j % 16 / 2);
            *reinterpret_cast<uint32_t*>(shared + S::kM + at) = high;
            *reinterpret_cast<uint32_t*>(shared + S::kM + kTileBytes + at) = low;
        }
#pragma unroll
        for (int c = 0; c < 4; ++c) good = good && fabsf(y_[c]) * s_norm[i] < kGrowthLimit;
    }
    const bool redo = __syncthreads_or(!good);
    if (rank == 0 && tid == 0) p.redo[matrix] = redo;
    if (redo) {
        product.close();
        return;
    }

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
        product.reset();
        product.template start<Form::kAB, 2 * kTileBytes, kTileBytes>(sA, shared + S::kM, true);
        if (Product::kAsync && slab + 1 < slab1) fetch(slab + 1);
        product.template finish<0>();
        product.read(f);
        __syncthreads();
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int local = my_row + 8 * half, row = 128 * slab + local;
            float* const to = dst + static_cast<long>(row) * p.n;
#pragma unroll
            for (int q = 0; q < 4; ++q) {
                const int column = 16 * q + lane % 4 * 4;
                float4 v = make_float4(f.v[2 * q][half].x, f.v[2 * q][half].y, f.v[2 * q + 1][half].x, f.v[2 * q + 1][half].y), h = v;
                if (row < 64) {
                    const float* const vt = sVt + column * kPitch + row;
                    const float4 r = *reinterpret_cast<const float4*>(sR + row * kPitch + column);
                    v = make_float4(vt[0], vt[kPitch], vt[2 * kPitch], vt[3 * kPitch]);
                    h = make_float4(row > column ? v.x : r.x, row > column + 1 ? v.y : r.y, row > column + 2 ? v.z : r.z, row > column + 3 ? v.w : r.w);
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
                const int at = local / 64 * kTileBytes + tile_offset(local % 64, column);
                *reinterpret_cast<uint2*>(sA + at) = high;
                *reinterpret_cast<uint2*>(sA + 2 * kTileBytes + at) = low;
            }
        }
        __syncthreads();
        for (int e = tid * 16; e < 4 * kTileBytes; e += kGramThreads * 16) {
            const int part = e / (2 * kTileBytes), block = e / kTileBytes % 2, row_block = 2 * slab + block;
            if (row_block < p.row_blocks)
                *reinterpret_cast<uint4*>(p.v_tiles + (matrix * p.row_blocks + row_block) * kPairBytes + part * kTileBytes + e % kTileBytes)
                    = *reinterpret_cast<const uint4*>(sA + e);
        }
        if (!Product::kAsync && slab + 1 < slab1) fetch(slab + 1);
        __syncthreads();
    }

    // tau = 2 / |v|^2: over a warp's rows, the warps, the ranks, in that order
    float* const s_squares = reinterpret_cast<float*>(shared + S::kRows);   // 8 x 64: reaches into norms and reciprocals, done with
    static_assert(S::kMail - S::kRows >= 4 * 8 * 64);
#pragma unroll
    for (int q = 0; q < 4; ++q)
#pragma unroll
        for (int e = 0; e < 4; ++e) {
#pragma unroll
            for (int o = 4; o < 32; o *= 2) squares[q][e] += __shfl_xor_sync(0xffffffffu, squares[q][e], o);
            if (lane < 4) s_squares[warp * 64 + 16 * q + 4 * lane + e] = squares[q][e];
        }
    __syncthreads();
    if (tid < 64) {
        float total = 0;
        for (int q = 0; q < 8; ++q) total += s_squares[q * 64 + tid];
        in_rank(mail, 0)[rank * 64 + tid] = total;
    }
    if (ranks > 1) cluster_sync();
    else __syncthreads();
    if (rank == 0 && tid < 64) {
        float total = 0;
        for (uint32_t q = 0; q < ranks; ++q) total += mail[q * 64 + tid];
        p.tau[matrix * p.n + p.col + tid] = 2.0f / total;
    }
    product.close();
}

// ---------------------------------------------------------------------------------------------------------------------
// larfb: C -= V T^T (V^T C) on the trailing columns
// ---------------------------------------------------------------------------------------------------------------------
// One cluster per matrix and 64 columns of C, 256 threads a block, two blocks per multiprocessor. The rows are dealt to the
// cluster's blocks, four tiles of 64 rows to each at a time, which stay in registers from their first reading to their
// writing: up to 256 rows a block C is read once and written once. (More rows: all but the last four tiles are read again.)
//   1. W^T = C^T V     C is split on its way into shared memory; every warpgroup multiplies its own tiles
//   2. the partial W^T meet: each block adds up its share of the rows of W^T in a fixed order, multiplies it by T in float32,
//      splits it and gives it to all: Y^T = W^T T
//   3. C -= V Y        from the registers, into H
// The first panel reads C from A and writes H; later ones read and write H.
struct LarfbArgs {
    const float* src;
    float* dst;
    const uint8_t* v_tiles;
    const float* t;
    int n, col, row_blocks, column_blocks;
};
constexpr int kLarfbColumns = 64, kLarfbThreads = 256, kLarfbTiles = 4;
struct LarfbShared {                                                        // byte offsets
    static constexpr int kV = 0;                                            // 4 high tiles, 4 low tiles
    static constexpr int kC = kLarfbTiles * kPairBytes;                     // C of two tiles: high 2, low 2. Then:
    static constexpr int kW = kC;                                           // the block's W^T, 64 x 68 float32; Y^T (high, low)
    static constexpr int kShare = kC + kGramMatrixBytes;                    // its share of the cluster's W^T, up to 32 rows
    static constexpr int kT = kC + 2 * kPairBytes;                          // T, 64 x 64 float32
    static constexpr int kBarriers = kT + 4 * kPanelWidth * kPanelWidth;
    static constexpr int kBytes = kBarriers + 64;
    static_assert(kShare + 4 * 32 * kPitch <= kT);
    static_assert(2 * (kBytes + 1024) <= 228 * 1024, "two blocks per multiprocessor");
};

template <class Product, bool kAligned>
__global__ void __launch_bounds__(kLarfbThreads, 2) larfb_kernel(const LarfbArgs p) {
    using S = LarfbShared;
    extern __shared__ __align__(1024) uint8_t shared[];
    uint8_t* const sV = shared + S::kV;
    uint8_t* const sC = shared + S::kC;
    float* const sW = reinterpret_cast<float*>(shared + S::kW);
    float* const s_share = reinterpret_cast<float*>(shared + S::kShare);
    float* const sT = reinterpret_cast<float*>(shared + S::kT);
    uint64_t* const barriers = reinterpret_cast<uint64_t*>(shared + S::kBarriers);
    Product product(barriers, reinterpret_cast<uint32_t*>(barriers + 4));
    int rank = 0, ranks = 1;
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    asm("mov.u32 %0, %%cluster_nctarank;" : "=r"(ranks));
#endif
    const long matrix = blockIdx.x / ranks / p.column_blocks;
    const int block_column = p.col + kPanelWidth + blockIdx.x / ranks % p.column_blocks * kLarfbColumns;
    const int m = p.n - p.col, columns = min(kLarfbColumns, p.n - block_column);
    const int tile0 = p.row_blocks * rank / ranks, tile1 = p.row_blocks * (rank + 1) / ranks;
    const int rounds = max(1, (tile1 - tile0 + kLarfbTiles - 1) / kLarfbTiles);
    const float* const src = p.src + (matrix * p.n + p.col) * p.n + block_column;
    float* const dst = p.dst + (matrix * p.n + p.col) * p.n + block_column;
    const uint8_t* const v_tiles = p.v_tiles + matrix * p.row_blocks * kPairBytes;
    const int tid = threadIdx.x, lane = tid % 32, warp = tid / 32, group = tid / 128;
    const int f_row = lane / 4, f_column = lane % 4 * 2, my_row = Product::row_of_warp() + f_row;

    for (int e = tid; e < kPanelWidth * kPanelWidth / 4; e += kLarfbThreads)
        copy_async_16(sT + 4 * e, p.t + matrix * kPanelWidth * kPanelWidth + 4 * e);
    Fragment c[2];                                                          // tile pairs (0, 1) and (2, 3) of the round
    // Rounds go up for W and down again for C, so that the last one's tiles need no second reading.
#pragma unroll 1
    for (int step = 0; step < 2 * rounds; ++step) {
        const bool down = step >= rounds;
        const int first = tile0 + kLarfbTiles * (down ? 2 * rounds - 1 - step : step);
        const int row_end = min(64 * min(tile1, first + kLarfbTiles), m);
        if (step != rounds) {
            if (step) {                                                     // V's last readers
                product.template finish<0>();
                __syncthreads();
            }
            for (int e = tid * 16; e < kLarfbTiles * kPairBytes; e += kLarfbThreads * 16) {
                const int tile = e / kPairBytes, part = e % kPairBytes / kTileBytes, at = e % kTileBytes;
                uint8_t* const to = sV + (part * kLarfbTiles + tile) * kTileBytes + at;
                if (first + tile < tile1) copy_async_16(to, v_tiles + static_cast<long>(first + tile) * kPairBytes + part * kTileBytes + at);
                else *reinterpret_cast<uint4*>(to) = make_uint4(0, 0, 0, 0);
            }
            copy_async_commit();
#pragma unroll
            for (int pair = 0; pair < 2; ++pair)
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    const int row = 64 * first + 128 * pair + my_row + 8 * half;
                    const float* const at = src + static_cast<long>(row) * p.n + f_column;
#pragma unroll
                    for (int b = 0; b < 8; ++b) {
                        float2 x = make_float2(0, 0);
                        if (row < row_end && 8 * b + f_column < columns) {
                            if (kAligned) x = *reinterpret_cast<const float2*>(at + 8 * b);
                            else { x.x = at[8 * b]; if (8 * b + f_column + 1 < columns) x.y = at[8 * b + 1]; }
                        }
                        c[pair].v[b][half] = x;
                    }
                }
        }
        if (!down) {
            // 1. W^T += C^T V, two tiles at a time
#pragma unroll
            for (int pair = 0; pair < 2; ++pair) {
                product.template finish<0>();
                if (step || pair) __syncthreads();                          // the last product has left sC
#pragma unroll
                for (int half = 0; half < 2; ++half)
#pragma unroll
                    for (int b = 0; b < 8; ++b) {
                        uint32_t high, low;
                        split_bf16(c[pair].v[b][half].x, c[pair].v[b][half].y, high, low);
                        const int row = my_row + 8 * half, at = row / 64 * kTileBytes + tile_offset(row % 64, 8 * b + f_column);
                        *reinterpret_cast<uint32_t*>(sC + at) = high;
                        *reinterpret_cast<uint32_t*>(sC + 2 * kTileBytes + at) = low;
                    }
                if (pair == 0) copy_async_wait<0>();
                fence_async_proxy();
                __syncthreads();
                product.template start_split<2 * kTileBytes, kLarfbTiles * kTileBytes>(sC, sV + 2 * pair * kTileBytes, step == 0 && pair == 0);
            }
            if (step + 1 < rounds) continue;
            // 2. The warpgroups' and the ranks' partial sums, in order; Y^T = W^T T
            product.template finish<0>();
            Fragment f;
            product.read_group(f);
            __syncthreads();
            for (int g = 0; g < 2; ++g) {
                if (g == group)
#pragma unroll
                    for (int b = 0; b < 8; ++b)
#pragma unroll
                        for (int half = 0; half < 2; ++half) {
                            float2* const to = reinterpret_cast<float2*>(sW + (warp % 4 * 16 + f_row + 8 * half) * kPitch + 8 * b + f_column);
                            const float2 old = g ? *to : make_float2(0, 0);
                            *to = make_float2(old.x + f.v[b][half].x, old.y + f.v[b][half].y);
                        }
                __syncthreads();
            }
            const int row0 = 32 * rank / ranks * 2, rows = 32 * (rank + 1) / ranks * 2 - row0;
            const float* share = sW;
            if (ranks > 1) {
                cluster_sync();
                for (int e = tid; e < rows * 16; e += kLarfbThreads) {
                    const int at = (row0 + e / 16) * kPitch + e % 16 * 4;
                    float4 total = make_float4(0, 0, 0, 0);
#pragma unroll 4
                    for (int q = 0; q < ranks; ++q) {
                        const float4 x = *reinterpret_cast<const float4*>(in_rank(sW, q) + at);
                        total = make_float4(total.x + x.x, total.y + x.y, total.z + x.z, total.w + x.w);
                    }
                    *reinterpret_cast<float4*>(s_share + e / 16 * kPitch + e % 16 * 4) = total;
                }
                share = s_share;
                cluster_arrive();                                           // my reading of the others' W is over
                __syncthreads();
            }
            float y[2][2][4] = {};
#pragma unroll
            for (int t = 0; t < 2; ++t) {
                const int e = tid + t * kLarfbThreads, i = e / 16 * 2, j = e % 16 * 4;
                if (i < rows) small_product<kPanelWidth>(y[t], share, sT, i, j, 0, j + 4);
            }
            if (ranks > 1) cluster_wait();                                  // everybody's is: Y may take W's place
            else __syncthreads();
#pragma unroll
            for (int t = 0; t < 2; ++t) {
                const int e = tid + t * kLarfbThreads, i = e / 16 * 2, j = e % 16 * 4;
                if (i < rows)
#pragma unroll
                    for (int r = 0; r < 2; ++r) {
                        uint2 high, low;
                        split_bf16(y[t][r][0], y[t][r][1], high.x, low.x);
                        split_bf16(y[t][r][2], y[t][r][3], high.y, low.y);
                        uint8_t* const at = shared + S::kW + tile_offset(row0 + i + r, j);
                        for (int q = 0; q < ranks; ++q) {
                            *reinterpret_cast<uint2*>(in_rank(at, q)) = high;
                            *reinterpret_cast<uint2*>(in_rank(at, q) + kTileBytes) = low;
                        }
                    }
            }
            fence_async_proxy();
            if (ranks > 1) cluster_sync();
            else __syncthreads();
            fence_async_proxy();                                            // what other blocks wrote here
            continue;
        }
        // 3. C -= V Y
        if (step != rounds) {
            copy_async_wait<0>();
            fence_async_proxy();
            __syncthreads();
        }
#pragma unroll
        for (int pair = 0; pair < 2; ++pair) {
            if (first + 2 * pair >= tile1) break;
            product.reset();
            product.template start<Form::kABt, kLarfbTiles * kTileBytes, kTileBytes>(sV + 2 * pair * kTileBytes, shared + S::kW, true);
            product.template finish<0>();
            Fragment f;
            product.read(f);
            if (Product::kTmemColumns) __syncthreads();                     // one accumulator, read before it is written again
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int row = 64 * first + 128 * pair + my_row + 8 * half;
                float* const at = dst + static_cast<long>(row) * p.n + f_column;
#pragma unroll
                for (int b = 0; b < 8; ++b) {
                    const float2 x = make_float2(c[pair].v[b][half].x - f.v[b][half].x, c[pair].v[b][half].y - f.v[b][half].y);
                    if (row < row_end && 8 * b + f_column < columns) {
                        if (kAligned) *reinterpret_cast<float2*>(at + 8 * b) = x;
                        else { at[8 * b] = x.x; if (8 * b + f_column + 1 < columns) at[8 * b + 1] = x.y; }
                    }
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
enum Backend { kMma = 0, kWgmma = 1, kTcgen05 = 2 };
enum StepKind { kWhole = 0, kPanel = 1, kClusterPanel = 2, kTallPanel = 3 };

namespace {
thread_local char error_text[256];

struct Launcher {
    const char* error = nullptr;
    // First use of a kernel on a device raises its shared memory limit (once: a later, smaller request must not lower it).
    template <typename... Args>
    void operator()(const char* name, void (*kernel)(Args...), long blocks, int threads, int smem_bytes, int ranks, Args... args) {
        if (error) return;
        cudaError_t status = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, smem_bytes);
        if (status == cudaSuccess && ranks > 8) status = cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
        if (status == cudaSuccess) {
            cudaLaunchConfig_t config = {};
            cudaLaunchAttribute attribute = {};
            config.gridDim = dim3(static_cast<unsigned>(blocks));
            config.blockDim = dim3(threads);
            config.dynamicSmemBytes = smem_bytes;
            if (ranks > 1) {
                attribute.id = cudaLaunchAttributeClusterDimension;
                attribute.val.clusterDim.x = ranks;
                attribute.val.clusterDim.y = attribute.val.clusterDim.z = 1;
                config.attrs = &attribute;
                config.numAttrs = 1;
            }
            status = cudaLaunchKernelEx(&config, kernel, args...);
        }
        if (status != cudaSuccess) {
            cudaGetLastError();                                             // a refused launch must not poison the next call
            snprintf(error_text, sizeof error_text, "%s: %ld blocks of %d threads, %d bytes of shared memory, clusters of %d: %s",
                     name, blocks, threads, smem_bytes, ranks, cudaGetErrorString(status));
            error = error_text;
        }
    }
};

template <int R, int CW, int NW, bool kIsPanel> void geqr2(Launcher& launch, const PanelArgs& p, int batch) {
    using Shape = Geqr2Shape<R, CW, NW, kIsPanel>;
    launch("geqr2_kernel", geqr2_kernel<R, CW, NW, kIsPanel>, batch, Shape::kThreads, Shape::kSmemBytes, 1, p);
}
template <int R> void geqr2_cluster(Launcher& launch, const PanelArgs& p, int batch, int ranks) {
    using Shape = Geqr2ClusterShape<R>;
    launch("geqr2_cluster_kernel", geqr2_cluster_kernel<R>, static_cast<long>(batch) * ranks, Shape::kThreads, Shape::kSmemBytes, ranks, p);
}
template <class Product> void gram_panel(Launcher& launch, const PanelArgs& p, int batch, int ranks) {
    launch("gram_panel_kernel", p.n % 4 ? gram_panel_kernel<Product, false> : gram_panel_kernel<Product, true>, static_cast<long>(batch) * ranks,
           kGramThreads, GramShared::kBytes, ranks, p);
}
void gram_panel(Launcher& launch, const PanelArgs& p, int batch, int ranks, int backend) {
#if defined(KITTENS_HOPPER)
    if (backend == kWgmma) return gram_panel<Wgmma>(launch, p, batch, ranks);
#endif
#if defined(KITTENS_BLACKWELL)
    if (backend == kTcgen05) return gram_panel<Tcgen05>(launch, p, batch, ranks);
#endif
    gram_panel<MmaSync>(launch, p, batch, ranks);
}
template <class Product> void larfb(Launcher& launch, const LarfbArgs& p, int batch, int ranks) {
    launch("larfb_kernel", p.n % 4 ? larfb_kernel<Product, false> : larfb_kernel<Product, true>, static_cast<long>(batch) * p.column_blocks * ranks,
           kLarfbThreads, LarfbShared::kBytes, ranks, p);
}
void larfb(Launcher& launch, const LarfbArgs& p, int batch, int ranks, int backend) {
#if defined(KITTENS_HOPPER)
    if (backend == kWgmma) return larfb<Wgmma>(launch, p, batch, ranks);
#endif
#if defined(KITTENS_BLACKWELL)
    if (backend == kTcgen05) return larfb<Tcgen05>(launch, p, batch, ranks);
#endif
    larfb<MmaSync>(launch, p, batch, ranks);
}
}  // namespace

// Factors A (batch x n x n, row-major) into H and tau. steps: count x (kind, first column, R, ranks,
// ranks of the Gram kernel or 0, ranks of the update), in order of columns.
// work: qr_work_bytes(batch, n) bytes, 128-byte aligned; unused when the only step is kWhole. Returns null or an error text.
extern "C" const char* qr_geqrf(const float* A, float* H, float* tau, void* work, int batch, int n, const int* steps, int count, int backend) {
    Launcher launch;
    float* const t = static_cast<float*>(work);
    uint8_t* const v_tiles = reinterpret_cast<uint8_t*>(t + static_cast<long>(batch) * kPanelWidth * kPanelWidth);
    int* const redo = reinterpret_cast<int*>(v_tiles + static_cast<long>(batch) * ((n + 63) / 64) * kPairBytes);
    for (int i = 0; i < count && !launch.error; ++i, steps += 6) {
        const int kind = steps[0], col = steps[1], R = steps[2], ranks = steps[3], gram_ranks = steps[4], larfb_ranks = steps[5], m = n - col, row_blocks = (m + 63) / 64;
        const PanelArgs p = {col ? H : A, H, tau, v_tiles, t, gram_ranks ? redo : nullptr, n, col, row_blocks};
        if (gram_ranks) gram_panel(launch, p, batch, gram_ranks, backend);
        if (kind == kWhole) {
            switch (R) {
                case 1: geqr2<1, 4, 8, false>(launch, p, batch); break;
                case 2: geqr2<2, 8, 8, false>(launch, p, batch); break;
                case 3: geqr2<3, 8, 12, false>(launch, p, batch); break;
                case 4: geqr2<4, 8, 16, false>(launch, p, batch); break;
                case 5: geqr2<5, 8, 20, false>(launch, p, batch); break;
                case 6: geqr2<6, 16, 12, false>(launch, p, batch); break;
                default: return "qr_geqrf: no whole-matrix kernel for this number of rows";
            }
            continue;
        }
        if (kind == kPanel) {
            switch (R) {
                case 8: geqr2<8, 8, 8, true>(launch, p, batch); break;
                case 16: geqr2<16, 4, 16, true>(launch, p, batch); break;
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
        const int trailing = m - kPanelWidth;
        if (trailing > 0)
            larfb(launch, {p.src, H, v_tiles, t, n, col, row_blocks, (trailing + kLarfbColumns - 1) / kLarfbColumns}, batch, larfb_ranks, backend);
    }
    return launch.error;
}
extern "C" long qr_work_bytes(int batch, int n) { return static_cast<long>(batch) * ((n + 63) / 64 + 1) * kPairBytes + batch * sizeof(int); }

// The largest cluster of the tallest panel kernel that the current device can hold, 0 without clusters.
extern "C" int qr_max_cluster() {
    using Shape = Geqr2ClusterShape<16>;
    for (int ranks = kMaxCluster; ranks > 1; ranks /= 2) {
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
            && cudaOccupancyMaxActiveClusters(&clusters, geqr2_cluster_kernel<16>, &config) == cudaSuccess && clusters > 0)
            return ranks;
    }
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

extern "C" const char* qr_geqrf(const float*, float*, float*, void*, int, int, const int*, int, int);
extern "C" long qr_work_bytes(int, int);
extern "C" int qr_max_cluster();

// A: batch x n x n, float32, CUDA, contiguous; steps: the plan's, flattened. Returns H, tau. Work space: 256 bytes a row of
// A and 16 KiB a matrix, from torch's allocator.
std::tuple<at::Tensor, at::Tensor> geqrf(const at::Tensor& A, const std::vector<int>& steps, int backend) {
    const c10::DeviceGuard guard(A.device());
    const auto options = A.options().requires_grad(false);
    const int batch = A.size(0), n = A.size(1), count = steps.size() / 6;
    // The kernels load 16 bytes at a time; a view may start anywhere.
    const at::Tensor aligned = reinterpret_cast<uintptr_t>(A.const_data_ptr()) % 16 ? A.clone() : A;
    at::Tensor H = at::empty(A.sizes(), options), tau = at::empty({batch, n}, options), work;
    if (count > 1) work = at::empty({qr_work_bytes(batch, n)}, options.dtype(at::kByte));
    const char* error = qr_geqrf(aligned.const_data_ptr<float>(), H.mutable_data_ptr<float>(), tau.mutable_data_ptr<float>(),
                                 count > 1 ? work.mutable_data_ptr() : nullptr, batch, n, steps.data(), count, backend);
    TORCH_CHECK(!error, error);
    return {H, tau};
}

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
    module.def("geqrf", &geqrf);
    module.def("max_cluster", &qr_max_cluster);
}
"""

# =====================================================================================================================
# Build
# =====================================================================================================================
THUNDERKITTENS_URL = "https://github.com/HazyResearch/ThunderKittens"
THUNDERKITTENS_COMMIT = "0b55588d2769dde0c7a9a606ffc015b0ca7a9551"
BACKENDS = {"mma": 0, "wgmma": 1, "tcgen05": 2}   # as in the CUDA source's enum Backend


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


def prove(extension, backend: str, info: DeviceInfo, device: torch.device) -> None:
    """Factor two random 260 x 260 matrices and compare with float64. Raises BuildError if they are not right."""
    n = 260
    A = torch.randn(2, n, n, generator=torch.Generator().manual_seed(1)).to(device)
    H, tau = extension.geqrf(A, _flat(plan(2, n, info, backend)), BACKENDS[backend])
    Q = torch.linalg.householder_product(H.double(), tau.double())
    residual = ((Q.mT @ A.double() - H.double().triu()).abs().sum(1).amax() / A.double().abs().sum(1).amax()).item()
    if not residual < n * torch.finfo(torch.float32).eps:
        raise BuildError(f"the {backend} backend computed a wrong factorization (residual {residual:.2g} of the norm)")


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
            properties = torch.cuda.get_device_properties(index)
            with torch.cuda.device(index):
                info = DeviceInfo(capability, properties.multi_processor_count, properties.shared_memory_per_block_optin, extension.max_cluster())
                prove(extension, name, info, torch.device("cuda", index))
            return Choice(name, extension, info, "; ".join(reasons))
        except (BuildError, RuntimeError) as error:
            if forced:
                raise
            reasons.append(str(error))
            warnings.warn(f"custom_kernel cannot use {name}: {error}")
    return Choice("geqrf", None, None, "; ".join(reasons))


def _flat(route: Plan) -> list[int]:
    return [value for step in route.steps for value in step]


@functools.lru_cache(maxsize=1024)
def _route(index: int, batch: int, n: int) -> tuple[Plan, list[int], object, int]:
    choice = choose_backend(index)
    route = Plan("geqrf", (), choice.reason) if choice.extension is None else plan(batch, n, choice.info, choice.name)
    return route, _flat(route), choice.extension, BACKENDS.get(route.backend, -1)


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
    route, steps, extension, backend = _route(data.device.index, data.shape[0], data.shape[1])
    if not steps:
        return tuple(torch.geqrf(data))
    return extension.geqrf(data.contiguous(), steps, backend)
