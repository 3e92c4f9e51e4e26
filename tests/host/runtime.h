// CUDA's execution model on host threads, as far as the kernels of submission.py use it: enough to run them, slowly, without a GPU.
//
// A CUDA thread is a std::thread; the blocks of a cluster run together, clusters one after another. This replaces the source's
// "Shared device helpers": the same names, without PTX. Shared memory starts as NaN. Memory is sequentially consistent here: what is
// missing a fence is not found, but every index, barrier count, phase and order of steps is.
#include <algorithm>
#include <atomic>
#include <barrier>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <type_traits>
#include <utility>
#include <vector>
using std::max, std::min;

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __grid_constant__
#define __launch_bounds__(...)

struct float2 { float x, y; };
struct alignas(16) float4 { float x, y, z, w; };
struct uint2 { uint32_t x, y; };
struct alignas(16) uint4 { uint32_t x, y, z, w; };
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline uint2 make_uint2(uint32_t x, uint32_t y) { return {x, y}; }
inline uint4 make_uint4(uint32_t x, uint32_t y, uint32_t z, uint32_t w) { return {x, y, z, w}; }
inline float __uint_as_float(uint32_t u) { float f; memcpy(&f, &u, 4); return f; }
inline uint32_t __float_as_uint(float f) { uint32_t u; memcpy(&u, &f, 4); return u; }

constexpr int kPanelWidth = 64, kTileBytes = 64 * 64 * 2, kPairBytes = 2 * kTileBytes, kTripleBytes = 3 * kTileBytes, kPairArrivals = 1;
inline int tile_offset(int row, int column) { return row * 128 + ((2 * column) ^ ((row & 7) << 4)); }
inline uint32_t to_bf16(float x) {
    const uint32_t u = __float_as_uint(x);
    return x != x ? 0x7fff : (u + 0x7fff + (u >> 16 & 1)) >> 16;
}
inline void split_bf16(float x, float y, uint32_t& high, uint32_t& low) {
    const uint32_t hx = to_bf16(x), hy = to_bf16(y);
    high = hx | hy << 16;
    low = to_bf16(x - __uint_as_float(hx << 16)) | to_bf16(y - __uint_as_float(hy << 16)) << 16;
}
inline uint32_t take_bf16(float& x, float& y) {
    const uint32_t hx = __float_as_uint(x) & 0xffff0000u, hy = __float_as_uint(y) & 0xffff0000u;
    x -= __uint_as_float(hx);
    y -= __uint_as_float(hy);
    return hx >> 16 | hy;
}
template <int N> void split_parts(float x, float y, uint32_t (&part)[N]) {
    for (uint32_t& both : part) {
        const uint32_t hx = to_bf16(x), hy = to_bf16(y);
        both = hx | hy << 16;
        x -= __uint_as_float(hx << 16);
        y -= __uint_as_float(hy << 16);
    }
}
template <int N> void pack_step(const float (&left)[4], const float (&right)[4], uint32_t (&a)[N][4]) {
    for (int e = 0; e < 4; ++e) {
        const float (&from)[4] = e / 2 ? right : left;
        uint32_t part[N];
        split_parts(from[e % 2 * 2], from[e % 2 * 2 + 1], part);
        for (int k = 0; k < N; ++k) a[k][e] = part[k];
    }
}

// ---- threads, warps, blocks, clusters
struct Index { int x; };
struct Warp {
    std::barrier<> all{32};
    float value[32];
    struct Operands { uint32_t a[4], b[2]; const uint8_t* row; } operands[2][32];      // in turn: one meeting for each use
};
struct Block {
    Block(int threads, int bytes) : warps(threads / 32), all(threads), memory(bytes + 2048, 0xff) {
        shared = reinterpret_cast<uint8_t*>((reinterpret_cast<uintptr_t>(memory.data()) + 1023) / 1024 * 1024);
        for (auto& warp : warps) warp = std::make_unique<Warp>();
        for (auto& group : groups) group = std::make_unique<std::barrier<>>(128);
    }
    std::vector<std::unique_ptr<Warp>> warps;
    std::barrier<> all;
    std::unique_ptr<std::barrier<>> groups[3];
    std::vector<uint8_t> memory;
    uint8_t* shared;
    std::atomic<bool> vote = false;
    float operand[3][2][64][64];                         // of a warpgroup's product from registers: high, low
};
struct Cluster { std::vector<std::unique_ptr<Block>> blocks; std::unique_ptr<std::barrier<>> all; };

inline Cluster* cluster;
thread_local Index threadIdx, blockIdx, blockDim;
thread_local Block* block;
thread_local uint32_t cluster_rank, cluster_ranks;

inline Warp& own_warp() { return *block->warps[threadIdx.x / 32]; }
inline void __syncwarp() { own_warp().all.arrive_and_wait(); }
inline void __syncthreads() { block->all.arrive_and_wait(); }
inline bool __syncthreads_or(bool mine) {
    if (mine) block->vote = true;
    __syncthreads();
    const bool any = block->vote;
    __syncthreads();
    block->vote = false;
    __syncthreads();
    return any;
}
inline void group_sync(int group) { block->groups[group]->arrive_and_wait(); }
inline void cluster_sync() { cluster->all->arrive_and_wait(); }
inline void cluster_arrive() {}
inline void cluster_wait() { cluster_sync(); }
template <typename T> T* in_rank(T* shared, uint32_t rank) {
    return reinterpret_cast<T*>(cluster->blocks[rank]->shared + (reinterpret_cast<uint8_t*>(shared) - block->shared));
}
template <typename T> T __shfl_sync(unsigned, T x, int lane) {
    Warp& warp = own_warp();
    warp.value[threadIdx.x % 32] = x;
    __syncwarp();
    const float got = warp.value[lane % 32];
    __syncwarp();
    return static_cast<T>(got);
}
inline float __shfl_xor_sync(unsigned mask, float x, int offset) { return __shfl_sync(mask, x, threadIdx.x % 32 ^ offset); }
inline bool __any_sync(unsigned, bool mine) {
    Warp& warp = own_warp();
    warp.value[threadIdx.x % 32] = mine;
    __syncwarp();
    bool any = false;
    for (const float x : warp.value) any |= x != 0;
    __syncwarp();
    return any;
}
template <int N> void warp_sum(float (&v)[N]) {
    for (int i = 0; i < N; ++i)
        for (int offset = 16; offset; offset /= 2) v[i] += __shfl_xor_sync(~0u, v[i], offset);
}
inline const Warp::Operands* exchange(const Warp::Operands& own) {
    static thread_local int turn = 0;
    Warp::Operands* const all = own_warp().operands[turn ^= 1];
    all[threadIdx.x % 32] = own;
    __syncwarp();
    return all;
}
inline void multiply_bf16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, const float (&c)[4]) {
    const Warp::Operands* const all = exchange({{a[0], a[1], a[2], a[3]}, {b0, b1}, nullptr});
    const auto part = [](uint32_t word, int k) -> double { return __uint_as_float(k % 2 ? word & 0xffff0000u : word << 16); };
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    for (int e = 0; e < 4; ++e) {
        double sum = c[e];
        for (int k = 0; k < 16; ++k)
            sum += part(all[4 * g + k % 8 / 2].a[e / 2 + k / 8 * 2], k) * part(all[4 * (2 * t + e % 2) + k % 8 / 2].b[k / 8], k);
        d[e] = static_cast<float>(sum);
        if (std::fabs(d[e]) > std::fabs(sum)) d[e] = std::nextafter(d[e], 0.0f);       // the accumulator is cut off, not rounded
    }
}
template <bool kTransposed> void load_matrices(uint32_t (&f)[4], const uint8_t* row) {
    const Warp::Operands* const all = exchange({{}, {}, row});
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    const auto entry = [&](int matrix, int i, int j) -> uint32_t { return reinterpret_cast<const uint16_t*>(all[8 * matrix + i].row)[j]; };
    for (int q = 0; q < 4; ++q)
        f[q] = kTransposed ? entry(q, 2 * t, g) | entry(q, 2 * t + 1, g) << 16 : entry(q, g, 2 * t) | entry(q, g, 2 * t + 1) << 16;
    __syncwarp();
}
inline float warp_max(float x) {
    for (int offset = 16; offset; offset /= 2) x = fmaxf(x, __shfl_xor_sync(~0u, x, offset));
    return x;
}
template <int N, typename Body> void static_for(Body body) {
    [&]<int... I>(std::integer_sequence<int, I...>) { (body(std::integral_constant<int, I>{}), ...); }(std::make_integer_sequence<int, N>{});
}

// ---- mbarriers: expected arrivals, those still missing, completed phases, bytes still missing
struct Phases {
    int8_t count, missing;
    uint16_t done;
    int32_t bytes;
    void change() {
        if (missing == 0 && bytes == 0) { missing = count; ++done; }
    }
};
inline std::mutex phases_lock;
inline void barrier_init(uint64_t* bar, int count) { *reinterpret_cast<Phases*>(bar) = {static_cast<int8_t>(count), static_cast<int8_t>(count), 0, 0}; }
inline void barrier_arrive(uint64_t* bar) {
    const std::lock_guard guard(phases_lock);
    Phases& phases = *reinterpret_cast<Phases*>(bar);
    --phases.missing;
    phases.change();
}
inline void barrier_expect(uint64_t* bar, int bytes) {
    const std::lock_guard guard(phases_lock);
    Phases& phases = *reinterpret_cast<Phases*>(bar);
    --phases.missing;
    phases.bytes += bytes;
    phases.change();
}
inline void push_four(float* to, uint64_t* bar, uint32_t rank, const float4& x) {
    *reinterpret_cast<float4*>(in_rank(to, rank)) = x;
    const std::lock_guard guard(phases_lock);
    Phases& phases = *reinterpret_cast<Phases*>(in_rank(bar, rank));
    phases.bytes -= sizeof x;
    phases.change();
}
inline void barrier_arrive_in(uint64_t* bar, uint32_t rank) { barrier_arrive(in_rank(bar, rank)); }
inline void barrier_wait(uint64_t* bar, int parity) {
    for (;; std::this_thread::yield()) {
        const std::lock_guard guard(phases_lock);
        if ((reinterpret_cast<Phases*>(bar)->done & 1) != static_cast<uint32_t>(parity)) return;
    }
}
inline void barrier_wait_cluster(uint64_t* bar, int parity) { barrier_wait(bar, parity); }
inline void load_pair(uint8_t* to, const uint8_t* from, uint64_t* full) {
    if (threadIdx.x % 32 == 0) {
        memcpy(to, from, kPairBytes);
        barrier_arrive(full);
    }
}
inline int count_block(int* counter) { return std::atomic_ref<int>(*counter).fetch_add(1); }
inline void __stcs(float2* to, float2 x) { *to = x; }
inline void fence_async_proxy() {}
inline void fence_async_proxy_global() {}
inline void allow_next_kernel() {}
struct CUtensorMap { const float* C; int batch, n; };
constexpr int kBoxBytes = 64 * 16 * sizeof(float);
inline int box_offset(int row, int column) { return row * 64 + ((4 * column) ^ ((row >> 1 & 3) << 4)); }
inline void load_box_async(uint8_t* to, const CUtensorMap& map, int column, int row, int matrix, uint64_t* full) {
    if (threadIdx.x % 32) return;
    for (int i = 0; i < 64; ++i)
        for (int j = 0; j < 16; ++j)
            *reinterpret_cast<float*>(to + box_offset(i, j)) = row + i < map.n && column + j < map.n ? map.C[(static_cast<long>(matrix) * map.n + row + i) * map.n + column + j] : 0;
    barrier_arrive(full);
}
inline void load_box_plain(uint8_t* to, const float* C, int n, int column, int row, long matrix, uint64_t* full) {
    load_box_async(to, {C, 0, n}, column, row, static_cast<int>(matrix), full);
    if (threadIdx.x % 32) barrier_arrive(full);
}
inline void copy_async_16(void* to, const void* from) { memcpy(to, from, 16); }
inline void copy_async_4(void* to, const void* from) { memcpy(to, from, 4); }
inline void copy_async_commit() {}
template <int N> void copy_async_wait() {}

// ---- launches: error names a kernel that cannot run here
struct Launcher {
    const char* error = nullptr;
    int multiprocessors = 2;
    bool beside = false;                                                    // kernels are run one after another here
    CUtensorMap box_map(const float* C, int batch, int n) { return {C, batch, n}; }
    template <typename... Args> void operator()(const char*, void (*kernel)(Args...), long blocks, int threads, int bytes, int ranks, Args... args) {
        for (long first = 0; first < blocks && !error; first += ranks) {
            Cluster together;
            together.all = std::make_unique<std::barrier<>>(static_cast<long>(threads) * ranks);
            for (int r = 0; r < ranks; ++r) together.blocks.push_back(std::make_unique<Block>(threads, bytes));
            cluster = &together;
            std::vector<std::thread> running;
            for (int r = 0; r < ranks; ++r)
                for (int t = 0; t < threads; ++t)
                    running.emplace_back([=, &together] {
                        threadIdx.x = t;
                        blockIdx.x = static_cast<int>(first) + r;
                        blockDim.x = threads;
                        block = together.blocks[r].get();
                        cluster_rank = r;
                        cluster_ranks = ranks;
                        kernel(args...);
                    });
            for (auto& thread : running) thread.join();
        }
    }
};
