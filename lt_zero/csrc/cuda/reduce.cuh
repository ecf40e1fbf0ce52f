// Sums that come out the same on every run and every GPU: no atomics, and no order that depends on scheduling.
//
// First pass: a block adds up each of its chunks, thread by thread and then over the block, into one partial sum a
// chunk. Second pass: one block a segment adds up the partial sums of the segment's chunks. Both orders are fixed by
// kChunk and the two block sizes. Everything is fp64, where squares of fp32 values are exact and do not overflow.
//
// Notes:
// - `partial` is the caller's scratch memory. Calls that may run at the same time (two streams) need one each; calls in
//   one stream may share it.
#pragma once

#include "launch.cuh"

namespace lt_cuda {

constexpr int kWarp = 32;
constexpr int kSumThreads = 1024;  // of a second-pass block, which works alone and must keep many loads in flight
constexpr unsigned kAllLanes = 0xffffffffu;

LT_DEVICE double warp_sum(double x) {
#pragma unroll
    for (int distance = kWarp / 2; distance > 0; distance /= 2) x += __shfl_down_sync(kAllLanes, x, distance);
    return x;
}

// The sum over a block of THREADS threads, valid in thread 0. All threads must call it.
template <int THREADS>
LT_DEVICE double block_sum(double x) {
    constexpr int warps = THREADS / kWarp;
    static_assert(THREADS % kWarp == 0 && warps <= kWarp, "the first warp adds up the warps' sums");
    __shared__ double sums[warps];
    int lane = (int)threadIdx.x % kWarp, warp = (int)threadIdx.x / kWarp;
    x = warp_sum(x);
    // Wait until all threads have read the sums of an earlier call, which are overwritten next.
    __syncthreads();
    if (lane == 0) sums[warp] = x;
    __syncthreads();
    if (warp == 0) x = warp_sum(lane < warps ? sums[lane] : 0.0);
    return x;
}

// sum + x * x: the product is exact, so fusing changes no bit and saves fp64 operations.
LT_DEVICE double add_square(double sum, Float x) { return fma((double)x.x, (double)x.x, sum); }

// Consecutive runs of chunks; segment i has the chunks start[i] ... start[i + 1] - 1.
struct Segments {
    static constexpr int capacity = kBatchBytes / (int)sizeof(int64_t) - 1;

    int64_t start[capacity + 1];
};

// sums[i][j] = the sum of partial[chunk][j] over the chunks of segment i; one block a segment. Where a step is skipped,
// the first pass has left no partial sums, and the results are 0.
template <int COLUMNS>
__global__ void __launch_bounds__(kSumThreads) sum_segments(const __grid_constant__ Segments segments,
                                                            const double *partial, double *sums,
                                                            const float *found_inf) {
    const bool skipped = found_inf && *found_inf != 0.0f;
    const int64_t begin = segments.start[blockIdx.x], end = skipped ? begin : segments.start[blockIdx.x + 1];
    for (int column = 0; column < COLUMNS; ++column) {
        double sum = 0.0;
#pragma unroll 4
        for (int64_t i = begin + threadIdx.x; i < end; i += kSumThreads)
            sum += partial[i * COLUMNS + column];
        sum = block_sum<kSumThreads>(sum);
        if (threadIdx.x == 0) sums[blockIdx.x * COLUMNS + column] = sum;
    }
}

}  // namespace lt_cuda
