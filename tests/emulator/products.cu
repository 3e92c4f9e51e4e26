// Appended to submission.py's CUDA source: each product of tiles by itself, for comparison with a plain product.
//
// One block. Per warpgroup g: A_g and B_g (64 x 64, row-major) -> out[0][g] = A_g B_g. Kinds: 0 start: 256 threads, A_0 over A_1 times
// B_0; 1, 2 start_exact<kAtB, kAB>; 3, 4 start_registers<kAB, kABt>; 5: 3 twice, the second product added to the first; 6, 7
// start_pairs<kAtB, kAB>; 8: two sums at once, out[1][g] = A_g B_h, h = (g + 1) % 4; 9: the same, one sum started after the other;
// 10: start_registers and two start_pairs before one wait, out[1][g] = 2 B_g^T B_h.
template <class Product>
__global__ void __launch_bounds__(512, 1) product_kernel(int kind, const float* A, const float* B, float* out) {
    extern __shared__ __align__(1024) uint8_t shared[];
    const int tid = threadIdx.x, group = tid / 128, in_group = tid % 128, lane = tid % 32, warp = tid / 32;
    uint8_t* const sA = shared + group * 2 * kTripleBytes;                  // three tiles, or the pair that registers pass through
    uint8_t* const sB = sA + (kind <= 2 ? kTripleBytes : kPairBytes);       // three tiles, or two pairs
    uint64_t* const barriers = reinterpret_cast<uint64_t*>(shared + 8 * kTripleBytes);
    Product product(barriers, reinterpret_cast<uint32_t*>(barriers + 6));
    const float* const a = A + group * 4096;
    const float* const b = B + group * 4096;
    const float* const b2 = B + (group + 1) % 4 * 4096;
    // (row, column) of an operand's tiles from element (i, j) of the matrix, both or one transposed
    const auto fill = [&](uint8_t* tiles, const float* from, bool transposed, int part_bytes, int parts) {
        for (int e = in_group; e < 2048; e += 128) {
            const int i = e / 32, j = e % 32 * 2;
            float x = transposed ? from[j * 64 + i] : from[i * 64 + j], y = transposed ? from[(j + 1) * 64 + i] : from[i * 64 + j + 1];
            uint32_t word[3];
            if (parts == 2) split_bf16(x, y, word[0], word[1]);
            else for (int t = 0; t < 3; ++t) word[t] = take_bf16(x, y);
            for (int t = 0; t < parts; ++t) *reinterpret_cast<uint32_t*>(tiles + t * part_bytes + tile_offset(i, j)) = word[t];
        }
    };
    Fragment f;
    int row = warp % 4 * 16 + lane / 4;
    const auto store = [&](float* to) {
        for (int b8 = 0; b8 < 8; ++b8)
            for (int half = 0; half < 2; ++half) *reinterpret_cast<float2*>(to + (row + 8 * half) * 64 + 8 * b8 + lane % 4 * 2) = f.v[b8][half];
    };
    if (kind == 0) {
        fill(shared + group * kTileBytes, a, false, 2 * kTileBytes, 2);     // two tiles of high, two of low
        if (group == 0) fill(shared + 4 * kTileBytes, b, false, kTileBytes, 2);
        fence_async_proxy();
        __syncthreads();
        product.template start<2 * kTileBytes, kTileBytes>(shared, shared + 4 * kTileBytes);
        product.finish();
        product.read(f);
        row = Product::row_of_warp() + lane / 4;
        out -= group * 4096;
    } else if (kind <= 2) {
        fill(sA, a, kind == 1, kTileBytes, 3);
        fill(sB, b, false, kTileBytes, 3);
        fence_async_proxy();
        group_sync(group);
        if (kind == 1) product.template start_exact<Form::kAtB>(sA, sB);
        else product.template start_exact<Form::kAB>(sA, sB);
        product.finish_group();
        product.read_group(f);
    } else if (kind == 6 || kind == 7) {
        fill(sA, a, kind == 6, kTileBytes, 2);
        fill(sB, b, false, kTileBytes, 2);
        fence_async_proxy();
        group_sync(group);
        if (kind == 6) product.template start_pairs<Form::kAtB>(sA, sB, true);
        else product.template start_pairs<Form::kAB>(sA, sB, true);
        product.finish_group();
        product.read_group(f);
    } else {
        fill(sB, b, kind == 4, kTileBytes, 2);
        if (kind >= 8) fill(sB + kPairBytes, b2, kind == 9, kTileBytes, 2);
        Operand operand;
        for (int s = 0; s < 4; ++s)
            for (int r = 0; r < 4; ++r) {
                const float* const at = a + (row + r % 2 * 8) * 64 + 16 * s + lane % 4 * 2 + r / 2 * 8;
                split_bf16(at[0], at[1], operand.high[s][r], operand.low[s][r]);
            }
        fence_async_proxy();
        group_sync(group);
        if (kind == 9) {
            product.template start_registers<Form::kAB, 0, 1>(operand, sB, sA, true);
            product.template start_registers<Form::kABt, 1, 1>(operand, sB + kPairBytes, sA, true);
            product.finish_group();
            product.read_group(f);
            store(out + group * 4096);
        } else if (kind == 10) {                         // as larfb's first round: the issuing thread fences ten times before the first MMA is done
            product.template start_registers<Form::kAB, 0, 1>(operand, sB, sA, true);
            product.template start_pairs<Form::kAtB, 1>(sB, sB + kPairBytes, true);
            product.template start_pairs<Form::kAtB, 1>(sB, sB + kPairBytes, false);
            product.finish_group();
            product.read_group(f);
            store(out + group * 4096);
        } else {
            for (int turn = 0; turn < (kind == 5 ? 2 : 1); ++turn) {
                if (kind == 4) product.template start_registers<Form::kABt, 0, 1>(operand, sB, sA, true);
                else if (kind == 8) product.template start_registers<Form::kAB, 0, 2>(operand, sB, sA, true);
                else product.template start_registers<Form::kAB, 0, 1>(operand, sB, sA, turn == 0);
                product.finish_group();
            }
            product.read_group(f);
            if (kind == 8) store(out + group * 4096);
        }
        if (kind >= 8) {
            product.template read_group<1>(f);
            store(out + (4 + group) * 4096);
        }
    }
    if (kind < 8) store(out + group * 4096);
    product.close();
}

extern "C" int run_products(int kind, int groups, const float* A, const float* B, float* out) {
#if defined(KITTENS_BLACKWELL)
    const auto kernel = product_kernel<Tcgen05<2>>;
#elif defined(KITTENS_HOPPER)
    const auto kernel = product_kernel<Wgmma<2>>;
#else
    const auto kernel = product_kernel<MmaSync<2>>;
#endif
    constexpr int bytes = 8 * kTripleBytes + 64;
    cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
    kernel<<<1, 128 * groups, bytes>>>(kind, A, B, out);
    return cudaDeviceSynchronize();
}
