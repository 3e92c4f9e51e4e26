// Products of tiles, by every thread for its own part of the result: the interface of MmaSync, Wgmma and Tcgen05.
template <int kSums> struct HostProduct {
    Fragment results[kSums];
    static constexpr bool kAsync = true, kStaged = false;
    static int row_of_warp() { return threadIdx.x / 32 * 16; }
    HostProduct(uint64_t*, uint32_t*) {}
    static float entry(const uint8_t* tile, int row, int column) {
        uint16_t bits;
        memcpy(&bits, tile + tile_offset(row, column), 2);
        return __uint_as_float(static_cast<uint32_t>(bits) << 16);
    }
    template <Form kForm, typename A> void add(A a, const uint8_t* b, int row, int into = 0) {
        const int lane = threadIdx.x % 32;
        for (int n8 = 0; n8 < 8; ++n8)
            for (int half = 0; half < 2; ++half)
                for (int e = 0; e < 2; ++e) {
                    const int m = row + lane / 4 + 8 * half, n = 8 * n8 + lane % 4 * 2 + e;
                    float sum = 0;
                    for (int k = 0; k < 64; ++k) sum = fmaf(a(m, k), kForm == Form::kABt ? entry(b, n, k) : entry(b, k, n), sum);
                    (e ? results[into].v[n8][half].y : results[into].v[n8][half].x) += sum;
                }
    }
    template <int kALow, int kBLow> void start(const uint8_t* a, const uint8_t* b) {
        results[0] = {};
        const auto tiles = [](const uint8_t* t) { return [=](int m, int k) { return entry(t + m / 64 * kTileBytes, m % 64, k); }; };
        add<Form::kAB>(tiles(a + kALow), b, row_of_warp());
        add<Form::kAB>(tiles(a), b + kBLow, row_of_warp());
        add<Form::kAB>(tiles(a), b, row_of_warp());
    }
    template <Form kForm> void start_exact(const uint8_t* a, const uint8_t* b) {
        results[0] = {};
        products_of_parts(a, b, [&](auto, const uint8_t* a_part, const uint8_t* b_part) {
            add<kForm>([=](int m, int k) { return kForm == Form::kAtB ? entry(a_part, k, m) : entry(a_part, m, k); }, b_part, threadIdx.x / 32 % 4 * 16);
        });
    }
    template <Form kForm, int kSum = 0> void start_pairs(const uint8_t* a, const uint8_t* b, bool clear) {
        if (clear) results[kSum] = {};
        const int row = threadIdx.x / 32 % 4 * 16;
        const auto tile = [](const uint8_t* t) { return [=](int m, int k) { return kForm == Form::kAtB ? entry(t, k, m) : entry(t, m, k); }; };
        add<kForm>(tile(a + kTileBytes), b, row, kSum);
        add<kForm>(tile(a), b + kTileBytes, row, kSum);
        add<kForm>(tile(a), b, row, kSum);
    }
    template <Form kForm, int kFirst, int kCount> void start_registers(const Operand& operand, const uint8_t* b, uint8_t*, bool clear) {
        auto& parts = block->operand[threadIdx.x / 128];
        const int lane = threadIdx.x % 32, row = threadIdx.x / 32 % 4 * 16;
        for (int s = 0; s < 4; ++s)
            for (int r = 0; r < 4; ++r)
                for (int e = 0; e < 2; ++e) {
                    const int m = row + lane / 4 + r % 2 * 8, k = 16 * s + lane % 4 * 2 + r / 2 * 8 + e;
                    parts[0][m][k] = __uint_as_float(e ? operand.high[s][r] & 0xffff0000u : operand.high[s][r] << 16);
                    parts[1][m][k] = __uint_as_float(e ? operand.low[s][r] & 0xffff0000u : operand.low[s][r] << 16);
                }
        __syncwarp();
        for (int i = 0; i < kCount; ++i) {
            const uint8_t* const high = b + i * kPairBytes;
            if (clear) results[kFirst + i] = {};
            add<kForm>([&](int m, int k) { return parts[1][m][k]; }, high, row, kFirst + i);
            add<kForm>([&](int m, int k) { return parts[0][m][k]; }, high + kTileBytes, row, kFirst + i);
            add<kForm>([&](int m, int k) { return parts[0][m][k]; }, high, row, kFirst + i);
        }
        __syncwarp();
    }
    void finish() {}
    void finish_group() {}
    void read(Fragment& f) { f = results[0]; }
    template <int kSum = 0> void read_group(Fragment& f) { f = results[kSum]; }
    void close() {}
};

// The same, as tcgen05 has it: A of a product from registers goes through shared memory, operands are read when the product is waited for
// and not before, and a sum is no number until then.
template <int kSums> struct StagedProduct : HostProduct<kSums> {
    using Base = HostProduct<kSums>;
    std::vector<std::function<void()>> waiting, block_waiting;
    bool pending[kSums] = {}, stage_is_read = false;
    static constexpr bool kStaged = true;
    static int row_of_warp() { return 32 * (threadIdx.x / 32 % 4) + 16 * (threadIdx.x / 128); }
    using Base::Base;
    template <int kALow, int kBLow> void start(const uint8_t* a, const uint8_t* b) {
        block_waiting.push_back([=, this] {
            this->results[0] = {};
            const auto tiles = [](const uint8_t* t) { return [=](int m, int k) { return Base::entry(t + m / 64 * kTileBytes, m % 64, k); }; };
            this->template add<Form::kAB>(tiles(a + kALow), b, row_of_warp());
            this->template add<Form::kAB>(tiles(a), b + kBLow, row_of_warp());
            this->template add<Form::kAB>(tiles(a), b, row_of_warp());
        });
    }
    template <Form kForm> void start_exact(const uint8_t* a, const uint8_t* b) {
        pending[0] = true;
        waiting.push_back([=, this] { Base::template start_exact<kForm>(a, b); });
    }
    template <Form kForm, int kSum = 0> void start_pairs(const uint8_t* a, const uint8_t* b, bool clear) {
        pending[kSum] = true;
        waiting.push_back([=, this] { Base::template start_pairs<kForm, kSum>(a, b, clear); });
    }
    template <Form kForm, int kFirst, int kCount> void start_registers(const Operand& operand, const uint8_t* b, uint8_t* stage, bool clear) {
        if (stage_is_read) finish_group();
        const int lane = threadIdx.x % 32, row = threadIdx.x % 128 / 32 * 16 + lane / 4;
        for (int s = 0; s < 4; ++s)
            for (int r = 0; r < 4; ++r) {
                uint8_t* const to = stage + tile_offset(row + r % 2 * 8, 16 * s + lane % 4 * 2 + r / 2 * 8);
                *reinterpret_cast<uint32_t*>(to) = operand.high[s][r];
                *reinterpret_cast<uint32_t*>(to + kTileBytes) = operand.low[s][r];
            }
        group_sync(threadIdx.x / 128);
        static_for<kCount>([&](auto i) { start_pairs<kForm, kFirst + i>(stage, b + i * kPairBytes, clear); });
        stage_is_read = true;
    }
    void finish_group() {
        group_sync(threadIdx.x / 128);
        for (auto& product : waiting) product();
        waiting.clear();
        for (bool& is : pending) is = false;
        stage_is_read = false;
        group_sync(threadIdx.x / 128);
    }
    void finish() {
        __syncthreads();
        for (auto& product : block_waiting) product();
        block_waiting.clear();
        __syncthreads();
    }
    void read(Fragment& f) { f = this->results[0]; }
    template <int kSum = 0> void read_group(Fragment& f) {
        f = this->results[kSum];
        if (pending[kSum]) f.v[0][0].x = NAN;
    }
};
