// tcgen05 in software, for Hopper: the device functions that rewrite.py puts in the place of Blackwell's instructions.
//
// Follows the PTX ISA (9.1, section 9.7.16), cta_group::1, kind::f16, bf16 operands in shared memory with the 128-byte swizzle,
// float32 accumulators: what our sources use. Anything else stops the kernel with a message.
//
// Asynchrony at its worst. An MMA is queued when it is issued and takes effect only when somebody waits on the mbarrier that
// the commit covering it names: its operands are read then, and until then its accumulator reads as NaN. Operands that an
// ordinary store wrote and its thread has not fenced (fence.proxy.async) when the MMA is issued make the result NaN. A load from
// tensor memory delivers at its wait (rewrite.py moves it there, and fills the registers with NaN before); it reads NaN where
// its thread has not fenced (tcgen05.fence::after_thread_sync) since the accumulator's last MMA.
//
// Stops the kernel, with a failed assertion of the file "tcgen05 emulator", whose line is the value in question: columns not
// allocated, allocation twice or not a power of two in 32..512, allocation not released when the next kernel allocates, released
// under an MMA that nobody waited for, an MMA issued by several threads at once, two threads' MMAs under way to one accumulator, a warp
// at lanes that are not its own, reserved or unsupported bits in a descriptor, operands that do not start at the swizzle's, a wait
// that never ends.
#include <cassert>
#include <cstdint>

namespace {
// kFences: the issuing thread fences in every kittens::mma; larfb's first round of a pair makes that ten times from operands to wait.
constexpr int kBlocks = 160, kQueue = 512, kFences = 64, kLanes = 128, kColumns = 512, kWords = 232448 / 4;
constexpr uint32_t kNan = 0x7fc0dead;

struct Mma {
    uint64_t a, b;
    uint32_t d, idesc;
    int accumulate, thread;
    uint32_t mbarrier;                                   // 0: not committed
    uint32_t time;                                       // of the issue
};
struct Block {
    uint32_t cells[kLanes * kColumns];
    uint64_t notes[kWords];                              // of the last ordinary store to a word: thread + 1 (high half), time
    uint32_t fences[1024][kFences];                      // times of a thread's last proxy fences
    uint32_t fence_count[1024];
    uint32_t fenced[1024];                               // time of a thread's last tcgen05.fence::after_thread_sync
    uint32_t written[2][kColumns];                       // time of the last MMA to a column, in lanes 0-15 and 16-31 of every quarter
    Mma queue[kQueue];
    uint32_t time;                                       // counts fences, issues and executions
    int count, lock, columns, polls;
};
__device__ Block blocks[kBlocks];

// A failed assertion is the one message that survives the end of its kernel.
__device__ __noinline__ void stop(const char* what, uint32_t value) { __assert_fail(what, "tcgen05 emulator", value, "stop"); }
__device__ Block& own_block() {
    if (gridDim.y != 1 || gridDim.z != 1 || blockIdx.x >= kBlocks) stop("more blocks than the emulator has room for", gridDim.x);
    return blocks[blockIdx.x];
}
__device__ void lock(Block& block) { while (atomicCAS(&block.lock, 0, 1)) __nanosleep(20); __threadfence(); }
__device__ void unlock(Block& block) { __threadfence(); atomicExch(&block.lock, 0); }

// The count last: loads look at the queue without the lock, and what an earlier product left behind it must not count.
__device__ void append(Block& block, const Mma& mma) {
    const int at = block.count;
    block.queue[at] = mma;
    __threadfence();
    *const_cast<volatile int*>(&block.count) = at + 1;
}

__device__ uint32_t row_of(const Mma& mma, int m) {      // the lane of D's row m
    const int rows = (mma.idesc >> 24 & 31) * 16;
    return rows == 128 ? m : (mma.d >> 16) + 32 * (m / 16) + m % 16;
}
__device__ bool same_lanes(const Mma& a, const Mma& b) {  // some lane is in both accumulators
    return (a.idesc >> 24 & 31) == 8 || (b.idesc >> 24 & 31) == 8 || a.d >> 16 == b.d >> 16;
}
__device__ bool in_columns(const Mma& mma, uint32_t column, uint32_t count = 1) {   // some of them are the accumulator's
    const uint32_t first = mma.d & 0xffff, columns = (mma.idesc >> 17 & 63) * 8;
    return column + count > first && column < first + columns;
}
// Shared-memory byte address, in the own block, of element (mn, k) under a matrix descriptor.
__device__ uint32_t address(uint64_t descriptor, bool mn_major, int mn, int k) {
    const uint32_t start = (descriptor & 0x3fff) << 4, leading = (descriptor >> 16 & 0x3fff) << 4, stride = (descriptor >> 32 & 0x3fff) << 4;
    const uint32_t offset = mn_major ? 2 * (mn % 64) + k % 8 * 128 + mn / 64 * leading + k / 8 * stride : mn % 8 * 128 + mn / 8 * stride + 2 * k;
    const uint32_t a = start + offset;
    return a ^ ((a >> 7 & 7) << 4);
}
__device__ float element(uint64_t descriptor, bool mn_major, int mn, int k) {
    uint16_t bits;
    uint32_t rank;                                       // the own window of a cluster's shared memory
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    asm volatile("ld.shared.u16 %0, [%1];" : "=h"(bits) : "r"(rank << 24 | address(descriptor, mn_major, mn, k)) : "memory");
    return __uint_as_float(static_cast<uint32_t>(bits) << 16);
}
__device__ void check_descriptor(uint64_t descriptor, bool mn_major) {
    if ((descriptor >> 46 & 7) != 1) stop("matrix descriptor: bits 46-48 are not 1", descriptor >> 32);
    if (descriptor >> 49 & 7) stop("matrix descriptor: base offset is not 0", descriptor >> 32);
    if (descriptor >> 52 & 0x1ff) stop("matrix descriptor: reserved bits or LBO mode", descriptor >> 32);
    if (descriptor >> 61 != 2) stop("matrix descriptor: swizzle is not 128 bytes", descriptor >> 32);
    if ((descriptor >> 14 & 3) || (descriptor >> 30 & 3)) stop("matrix descriptor: unused bits", descriptor);
    // K-major may start inside a row of 128 bytes, at another k; eight rows begin at a multiple of 1024.
    if (descriptor & (mn_major ? 0x3f : 0x38)) stop("matrix descriptor: not where the swizzle starts", descriptor);
}
// Did an ordinary store write this word with no fence of its thread between the store and the MMA's issue?
__device__ bool unfenced(const Block& block, uint32_t at, uint32_t issued) {
    const uint64_t note = const_cast<const volatile uint64_t&>(block.notes[at / 4]);
    if (!note) return false;
    const uint32_t thread = (note >> 32) - 1, stored = static_cast<uint32_t>(note);
    const uint32_t count = const_cast<const volatile uint32_t&>(block.fence_count[thread]);
    for (uint32_t i = 1; i <= kFences; ++i) {            // the latest first
        const uint32_t fence = const_cast<const volatile uint32_t&>(block.fences[thread][(count - i) % kFences]);
        if (fence <= stored) return true;
        if (fence < issued) return false;
    }
    stop("mma: its operands' writer has fenced more often since than the emulator remembers", thread);
    return true;
}
__device__ void execute(Block& block, const Mma& mma, unsigned lanes) {   // by the lanes of a warp together
    const int rank = __popc(lanes & ((1u << threadIdx.x % 32) - 1)), count = __popc(lanes);
    const int rows = (mma.idesc >> 24 & 31) * 16, columns = (mma.idesc >> 17 & 63) * 8;
    const bool a_mn = mma.idesc >> 15 & 1, b_mn = mma.idesc >> 16 & 1;
    bool stale = false;
    for (int e = rank; e < rows * 16; e += count) stale = stale || unfenced(block, address(mma.a, a_mn, e / 16, e % 16), mma.time);
    for (int e = rank; e < columns * 16; e += count) stale = stale || unfenced(block, address(mma.b, b_mn, e / 16, e % 16), mma.time);
    stale = __any_sync(lanes, stale);
    for (int e = rank; e < rows * columns; e += count) {
        const int m = e / columns, n = e % columns;
        uint32_t& cell = block.cells[row_of(mma, m) * kColumns + (mma.d & 0xffff) + n];
        float sum = mma.accumulate ? __uint_as_float(cell) : 0.0f;
        for (int k = 0; k < 16; ++k) sum = fmaf(element(mma.a, a_mn, m, k), element(mma.b, b_mn, n, k), sum);
        cell = stale ? kNan : __float_as_uint(sum);
    }
    const uint32_t now = 1 + atomicAdd(&block.time, 1);
    for (int half = 0; half < 2; ++half)
        if (rows == 128 || mma.d >> 20 == half)
            for (int n = rank; n < columns; n += count) block.written[half][(mma.d & 0xffff) + n] = now;
}
}  // namespace

extern "C" {

// tcgen05.alloc [address], columns: by a whole warp
__device__ __noinline__ void emulate_alloc(uint32_t address, uint32_t columns) {
    Block& block = own_block();
    for (int i = threadIdx.x % 32; i < kWords; i += 32) block.notes[i] = 0;
    for (int i = threadIdx.x % 32; i < kLanes * kColumns; i += 32) block.cells[i] = kNan;
    for (int i = threadIdx.x % 32; i < kColumns; i += 32) block.written[0][i] = block.written[1][i] = 0;
    if (threadIdx.x % 32 == 0) {
        if (block.columns) stop("alloc: columns of this or an earlier kernel were not released", block.columns);
        if (columns < 32 || columns > 512 || (columns & (columns - 1))) stop("alloc: not a power of two in 32..512", columns);
        block.columns = columns;
        block.count = block.polls = 0;
        asm volatile("st.shared.u32 [%0], %1;" ::"r"(address), "r"(0) : "memory");
        __threadfence();
    }
    __syncwarp();
}
__device__ __noinline__ void emulate_dealloc(uint32_t address, uint32_t columns) {
    Block& block = own_block();
    if (threadIdx.x % 32 == 0) {
        if (address || static_cast<int>(columns) != block.columns) stop("dealloc: not what was allocated", columns);
        for (int i = 0; i < block.count; ++i) stop(block.queue[i].mbarrier ? "dealloc: a commit was not waited for" : "dealloc: an MMA was never committed", i);
        block.columns = 0;
    }
    __syncwarp();
}
// tcgen05.mma [d], a, b, idesc, accumulate
__device__ __noinline__ void emulate_mma(uint32_t d, uint64_t a, uint64_t b, uint32_t idesc, uint32_t accumulate) {
    Block& block = own_block();
    if (__popc(__activemask()) != 1) stop("mma: issued by several threads", __activemask());
    check_descriptor(a, idesc >> 15 & 1);
    check_descriptor(b, idesc >> 16 & 1);
    const uint32_t rows = (idesc >> 24 & 31) * 16, columns = (idesc >> 17 & 63) * 8;
    if ((idesc & 0x1fff) != 0x490) stop("mma: instruction descriptor: not bf16 x bf16 -> float32", idesc);
    if (idesc >> 13 & 3 || idesc >> 23 & 1 || idesc >> 29) stop("mma: instruction descriptor: negated operand or reserved bits", idesc);
    if ((rows != 64 && rows != 128) || columns < 8 || columns > 256) stop("mma: instruction descriptor: M or N", idesc);
    if ((d >> 16) != 0 && !(rows == 64 && (d >> 16) == 16)) stop("mma: lane of the accumulator", d);
    if ((d & 0xffff) + columns > static_cast<uint32_t>(block.columns)) stop("mma: accumulator outside the allocated columns", d);
    lock(block);
    if (block.count == kQueue) stop("mma: more than the emulator's queue holds", block.count);
    const Mma mma = {a, b, d, idesc, static_cast<int>(accumulate), static_cast<int>(threadIdx.x), 0, 1 + atomicAdd(&block.time, 1)};
    for (int i = 0; i < block.count; ++i) {              // only one thread's, of one shape, keep their order
        const Mma& other = block.queue[i];
        if (other.thread < 0 || !same_lanes(mma, other) || !in_columns(other, d & 0xffff, columns)) continue;
        if (other.thread != mma.thread || other.d != d || other.idesc >> 17 != idesc >> 17) stop("mma: another one to these cells is under way", d);
    }
    append(block, mma);
    unlock(block);
}
// tcgen05.commit [mbarrier]: covers the thread's MMAs so far
__device__ __noinline__ void emulate_commit(uint32_t mbarrier) {
    Block& block = own_block();
    mbarrier &= 0xffffff;                                // without the block's rank in its cluster
    lock(block);
    for (int i = 0; i < block.count; ++i)
        if (block.queue[i].thread == static_cast<int>(threadIdx.x) && !block.queue[i].mbarrier) block.queue[i].mbarrier = mbarrier;
    if (block.count == kQueue) stop("commit: more than the emulator's queue holds", block.count);
    append(block, {0, 0, 0, 0, 0, -1, mbarrier, 0});     // the arrival itself
    unlock(block);
}
static __device__ bool passed(uint32_t mbarrier, uint32_t parity) {
    uint32_t yes;
    asm volatile("{.reg .pred p; mbarrier.test_wait.parity.shared.b64 p, [%1], %2; selp.u32 %0, 1, 0, p;}" : "=r"(yes) : "r"(mbarrier), "r"(parity) : "memory");
    return yes;
}
// Before every test of an mbarrier's phase that would fail: what the next commit to it covers happens now.
__device__ __noinline__ void emulate_wait(uint32_t mbarrier, uint32_t parity) {
    Block& block = own_block();
    if (passed(mbarrier, parity)) return;
    const unsigned lanes = __activemask();
    const int leader = __ffs(lanes) - 1;
    if (static_cast<int>(threadIdx.x % 32) == leader) {
        lock(block);
        if (++block.polls > 1000000) stop("wait: nothing has happened for a long time", mbarrier);
    }
    __syncwarp(lanes);
    int left = 0;
    bool arrives = false;
    // Another warp may have done it while this one waited for the lock; the next commit's turn is then the next wait's.
    const bool late = __shfl_sync(lanes, passed(mbarrier, parity), leader);
    const int count = late ? 0 : *const_cast<volatile int*>(&block.count);
    for (int i = 0; i < count; ++i) {
        const Mma mma = block.queue[i];
        __syncwarp(lanes);
        if (arrives || mma.mbarrier != (mbarrier & 0xffffff)) {
            if (static_cast<int>(threadIdx.x % 32) == leader) block.queue[left] = mma;
            ++left;
        } else if (mma.thread >= 0) {
            execute(block, mma, lanes);
            __threadfence();
        } else {
            arrives = true;
        }
        __syncwarp(lanes);
    }
    if (static_cast<int>(threadIdx.x % 32) == leader) {
        if (!late) *const_cast<volatile int*>(&block.count) = left;
        if (arrives) {                                   // last: whoever passes the barrier finds the queue without what it waited for
            block.polls = 0;
            __threadfence();
            asm volatile("{.reg .b64 state; mbarrier.arrive.shared.b64 state, [%0];}" ::"r"(mbarrier) : "memory");
        }
        unlock(block);
    }
    __syncwarp(lanes);
}
// Register r of tcgen05.ld.16x256b [address]
__device__ __noinline__ uint32_t emulate_ld(uint32_t address, uint32_t r) {
    Block& block = own_block();
    const int t = threadIdx.x % 32;
    const uint32_t base = address >> 16, lane = base + t / 4 + 8 * (r / 2 % 2), column = (address & 0xffff) + 8 * (r / 4) + 2 * (t % 4) + r % 2;
    if (base / 32 != threadIdx.x / 32 % 4 || base % 16) stop("ld: lanes of another warp", address);
    if (column >= static_cast<uint32_t>(block.columns)) stop("ld: outside the allocated columns", address);
    const int count = *const_cast<volatile int*>(&block.count);
    for (int i = 0; i < count; ++i) {                    // an accumulator with an MMA under way
        const Mma& mma = block.queue[i];
        if (mma.thread < 0) continue;
        const bool in_lanes = (mma.idesc >> 24 & 31) == 8 || lane % 32 / 16 == mma.d >> 20;
        if (in_lanes && in_columns(mma, column)) return kNan;
    }
    if (*const_cast<volatile uint32_t*>(&block.written[lane % 32 / 16][column]) > block.fenced[threadIdx.x]) return kNan;
    return *const_cast<volatile uint32_t*>(&block.cells[lane * kColumns + column]);
}
// An ordinary store of some bytes to shared memory (a shared-window address; stores to other blocks are not followed)
__device__ __noinline__ void emulate_store(uint32_t address, uint32_t bytes) {
    Block& block = own_block();
    for (uint32_t at = address & 0x3ffff; at < (address & 0x3ffff) + bytes; at += 4)
        if (at / 4 < kWords) block.notes[at / 4] = static_cast<uint64_t>(threadIdx.x + 1) << 32 | *const_cast<volatile uint32_t*>(&block.time);
}
__device__ __noinline__ void emulate_generic_store(uint64_t address, uint32_t bytes) {
    if (!__isShared(reinterpret_cast<void*>(address))) return;
    emulate_store(static_cast<uint32_t>(__cvta_generic_to_shared(reinterpret_cast<void*>(address))), bytes);
}
// A bulk copy to shared memory: through the asynchronous proxy, no fence needed
__device__ __noinline__ void emulate_bulk_copy(uint32_t address, uint32_t bytes) {
    Block& block = own_block();
    for (uint32_t at = address & 0x3ffff; at < (address & 0x3ffff) + bytes; at += 4)
        if (at / 4 < kWords) block.notes[at / 4] = 0;
}
__device__ __noinline__ void emulate_fence_after() {
    Block& block = own_block();
    __threadfence();
    block.fenced[threadIdx.x] = 1 + atomicAdd(&block.time, 1);
}
__device__ __noinline__ void emulate_proxy_fence() {
    Block& block = own_block();
    const uint32_t count = block.fence_count[threadIdx.x];
    block.fences[threadIdx.x][count % kFences] = 1 + atomicAdd(&block.time, 1);
    __threadfence();
    *const_cast<volatile uint32_t*>(&block.fence_count[threadIdx.x]) = count + 1;   // last: others look meanwhile
}

}
