// The places of the k largest magnitudes, in rising order, of equal ones the first. Magnitudes are compared as the
// integers that their bits are, so that NaN is above infinity.
//
// Three histograms find the bits of the k-th largest, from the highest 11 on to the lowest 10. Then chunks count what is
// above and what equals it, one block turns the counts into places, and chunks write their indices there. Only integers
// are added, so that no result depends on scheduling. All elements are read five times.
#include "launch.cuh"
#include "view.cuh"

#include "../codec.h"

namespace lt_cuda {

constexpr int kBins = 1 << 11;
constexpr int kScanThreads = 1024;
constexpr int kPerThread = (int)(kChunk / kThreads);
constexpr int kAtOnce = 4;  // elements of an access
constexpr int kWarps = kThreads / 32;
constexpr unsigned kEveryLane = 0xffffffffu;

// Device memory of a call; zeros at first.
struct Selection {
    int32_t threshold;      // the upper bits that are known; in the end all of them
    int64_t rank;           // of the element that is looked for among those with these bits, from 1; in the end: ties
    uint32_t bins[kBins];
};

// Of a chunk: how many are above the threshold and equal to it; then its place in the result, and the ties to take.
struct Tally {
    int64_t above, equal;
};

struct Digit {
    int shift, bits;  // the digit is magnitude >> shift & ((1 << bits) - 1); those above it are known

    LT_DEVICE bool known(int32_t magnitude, int32_t threshold) const {
        return (int64_t)magnitude >> (shift + bits) == (int64_t)threshold >> (shift + bits);
    }
};

// Where a thread's element `k` of a chunk stands in it: neighbouring threads have neighbouring accesses.
LT_DEVICE int place_striped(int k) { return (k / kAtOnce * kThreads + (int)threadIdx.x) * kAtOnce + k % kAtOnce; }

// A thread's elements of a chunk, in rising order; returns how many elements the chunk has.
LT_DEVICE int64_t load_striped(const float *c, int64_t numel, int64_t chunk, float (&x)[kPerThread]) {
    const int64_t begin = chunk * kChunk, count = numel - begin < kChunk ? numel - begin : kChunk;
    if (count == kChunk && View<float>((void *)c).template aligned<kAtOnce>()) {
#pragma unroll
        for (int k = 0; k < kPerThread; k += kAtOnce) {
            Lanes<kAtOnce> some = View<float>((void *)c).template load<kAtOnce>(begin + place_striped(k));
#pragma unroll
            for (int n = 0; n < kAtOnce; ++n) x[k + n] = some[n].x;
        }
    } else {
#pragma unroll
        for (int k = 0; k < kPerThread; ++k) x[k] = place_striped(k) < count ? c[begin + place_striped(k)] : 0.0f;
    }
    return count;
}

__global__ void __launch_bounds__(kThreads) start_selection(Selection *selection, int64_t k) {
    for (int bin = (int)threadIdx.x; bin < kBins; bin += kThreads) selection->bins[bin] = 0;
    if (threadIdx.x == 0) {
        selection->threshold = 0;
        selection->rank = k;
    }
}

__global__ void __launch_bounds__(kThreads)
    fill_bins(const float *c, int64_t numel, const Digit digit, Selection *selection) {
    __shared__ uint32_t bins[kBins];
    for (int bin = (int)threadIdx.x; bin < kBins; bin += kThreads) bins[bin] = 0;
    __syncthreads();
    const int32_t threshold = selection->threshold;
    for (int64_t chunk = blockIdx.x; chunk < chunks_of(numel); chunk += gridDim.x) {
        float x[kPerThread];
        const int64_t count = load_striped(c, numel, chunk, x);
#pragma unroll
        for (int k = 0; k < kPerThread; ++k) {
            const int32_t magnitude = magnitude_bits(x[k]);
            if (place_striped(k) < count && digit.known(magnitude, threshold))
                atomicAdd(&bins[magnitude >> digit.shift & ((1 << digit.bits) - 1)], 1u);
        }
    }
    __syncthreads();
    for (int bin = (int)threadIdx.x; bin < kBins; bin += kThreads)
        if (bins[bin] > 0) atomicAdd(&selection->bins[bin], bins[bin]);
}

// One block: the bin that has the rank, counted from the last bin down. Leaves bins of zeros for the next digit.
__global__ void __launch_bounds__(kThreads) choose_bin(const Digit digit, Selection *selection) {
    constexpr int each = kBins / kThreads;
    __shared__ uint32_t bins[kBins];
    __shared__ int64_t sums[kThreads];
    int64_t sum = 0;
    for (int n = 0; n < each; ++n) {
        const int bin = (int)threadIdx.x * each + n;
        sum += bins[bin] = selection->bins[bin];
        // The next digit counts into the same bins.
        selection->bins[bin] = 0;
    }
    sums[threadIdx.x] = sum;
    __syncthreads();
    if (threadIdx.x > 0) return;
    int64_t rank = selection->rank;
    int part = kThreads - 1;
    for (; part > 0 && sums[part] < rank; --part) rank -= sums[part];
    int bin = part * each + each - 1;
    for (; bin > 0 && (int64_t)bins[bin] < rank; --bin) rank -= bins[bin];
    selection->rank = rank;
    selection->threshold |= bin << digit.shift;
}

// Of the elements of one access: how many are above the threshold, and in the upper half how many equal it. A chunk has
// fewer than 2^16 of each, so that a sum of such counts is two sums.
LT_DEVICE uint32_t count_access(const float *x, int k, int64_t count, int32_t threshold) {
    uint32_t both = 0;
#pragma unroll
    for (int n = 0; n < kAtOnce; ++n) {
        const int32_t magnitude = magnitude_bits(x[k + n]);
        if (place_striped(k + n) < count) both += magnitude > threshold ? 1u : magnitude == threshold ? 1u << 16 : 0u;
    }
    return both;
}

LT_DEVICE uint32_t warp_count(uint32_t x) {
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) x += __shfl_down_sync(kEveryLane, x, distance);
    return x;
}

__global__ void __launch_bounds__(kThreads)
    count_chunks(const float *c, int64_t numel, const Selection *selection, Tally *tallies) {
    __shared__ uint32_t counts[kWarps];
    const int32_t threshold = selection->threshold;
    for (int64_t chunk = blockIdx.x; chunk < chunks_of(numel); chunk += gridDim.x) {
        float x[kPerThread];
        const int64_t count = load_striped(c, numel, chunk, x);
        uint32_t both = 0;
#pragma unroll
        for (int k = 0; k < kPerThread; k += kAtOnce) both += count_access(x, k, count, threshold);
        both = warp_count(both);
        if (threadIdx.x % 32 == 0) counts[threadIdx.x / 32] = both;
        __syncthreads();
        if (threadIdx.x == 0) {
            for (int warp = 1; warp < kWarps; ++warp) both += counts[warp];
            tallies[chunk] = Tally{both & 0xffffu, both >> 16};
        }
        __syncthreads();
    }
}

// tallies[t] = the sum of all before t. By one thread: what it saves is less than a barrier.
template <int THREADS>
LT_DEVICE void exclusive_sum(Tally *tallies) {
    Tally sum = {0, 0};
    for (int t = 0; t < THREADS; ++t) {
        const Tally own = tallies[t];
        tallies[t] = sum;
        sum.above += own.above;
        sum.equal += own.equal;
    }
}

// One block: the tallies become sums over the chunks before.
__global__ void __launch_bounds__(kScanThreads) place_chunks(int64_t chunks, Tally *tallies) {
    __shared__ Tally sums[kScanThreads];
    const int64_t each = (chunks + kScanThreads - 1) / kScanThreads, begin = threadIdx.x * each;
    const int64_t end = begin + each < chunks ? begin + each : chunks;
    Tally sum = {0, 0};
    for (int64_t chunk = begin; chunk < end; ++chunk) {
        sum.above += tallies[chunk].above;
        sum.equal += tallies[chunk].equal;
    }
    sums[threadIdx.x] = sum;
    __syncthreads();
    if (threadIdx.x == 0) exclusive_sum<kScanThreads>(sums);
    __syncthreads();
    sum = sums[threadIdx.x];
    for (int64_t chunk = begin; chunk < end; ++chunk) {
        const Tally own = tallies[chunk];
        tallies[chunk] = sum;
        sum.above += own.above;
        sum.equal += own.equal;
    }
}

__global__ void __launch_bounds__(kThreads, 2)
    write_indices(const float *c, int64_t numel, const Selection *selection, const Tally *tallies, int32_t *indices) {
    constexpr int accesses = kPerThread / kAtOnce;
    __shared__ uint32_t before[accesses * kWarps];  // in the order of elements: access by access, of each its warps
    const int32_t threshold = selection->threshold;
    const int64_t ties = selection->rank;
    const int lane = (int)threadIdx.x % 32, warp = (int)threadIdx.x / 32;
    for (int64_t chunk = blockIdx.x; chunk < chunks_of(numel); chunk += gridDim.x) {
        float x[kPerThread];
        const int64_t count = load_striped(c, numel, chunk, x);
        uint32_t within[accesses];  // of an access: how many of its warp's elements come before the thread's
#pragma unroll
        for (int access = 0; access < accesses; ++access) {
            const uint32_t own = count_access(x, access * kAtOnce, count, threshold);
            uint32_t sum = own;
#pragma unroll
            for (int distance = 1; distance < 32; distance *= 2) {
                const uint32_t other = __shfl_up_sync(kEveryLane, sum, distance);
                if (lane >= distance) sum += other;
            }
            if (lane == 31) before[access * kWarps + warp] = sum;
            within[access] = sum - own;
        }
        __syncthreads();
        if (threadIdx.x == 0) {
            uint32_t sum = 0;
            for (int at = 0; at < accesses * kWarps; ++at) {
                const uint32_t own = before[at];
                before[at] = sum;
                sum += own;
            }
        }
        __syncthreads();
        const Tally first = tallies[chunk];
#pragma unroll
        for (int access = 0; access < accesses; ++access) {
            const uint32_t both = before[access * kWarps + warp] + within[access];
            int64_t above = first.above + (both & 0xffffu), equal = first.equal + (both >> 16);
#pragma unroll
            for (int k = access * kAtOnce; k < (access + 1) * kAtOnce; ++k) {
                const int32_t magnitude = magnitude_bits(x[k]);
                if (place_striped(k) >= count || magnitude < threshold) continue;
                const bool tie = magnitude == threshold;
                // Before this element all larger ones are taken, and of the equal ones the first `ties`.
                if (!tie || equal < ties)
                    indices[above + (equal < ties ? equal : ties)] = (int32_t)(chunk * kChunk + place_striped(k));
                above += !tie;
                equal += tie;
            }
        }
        __syncthreads();  // the next chunk's counts are written where these are read
    }
}

int64_t selection_bytes() { return padded((int64_t)sizeof(Selection)); }

}  // namespace lt_cuda

using namespace lt_cuda;

LT_EXPORT int64_t lt_cuda_topk_scratch(int64_t numel) {
    return numel < 0 ? -1 : selection_bytes() + chunks_of(numel) * (int64_t)sizeof(Tally);
}

LT_EXPORT int lt_cuda_select_topk(const float *c, int64_t numel, int64_t k, int32_t *indices, void *scratch,
                                  void *stream) {
    if (numel < 0 || numel > INT32_MAX || k < 0 || k > numel || (k > 0 && (!c || !indices || !scratch)))
        return LT_BAD_ARGUMENT;
    if (k == 0) return LT_OK;
    Selection *selection = (Selection *)scratch;
    Tally *tallies = (Tally *)((char *)scratch + selection_bytes());
    int code = launch(start_selection, 1, kThreads, stream, selection, k);
    for (const Digit digit : {Digit{20, 11}, Digit{10, 10}, Digit{0, 10}}) {
        if (!code) code = launch_chunks(fill_bins, chunks_of(numel), stream, c, numel, digit, selection);
        if (!code) code = launch(choose_bin, 1, kThreads, stream, digit, selection);
    }
    if (!code) code = launch_chunks(count_chunks, chunks_of(numel), stream, c, numel, selection, tallies);
    if (!code) code = launch(place_chunks, 1, kScanThreads, stream, chunks_of(numel), tallies);
    if (!code) code = launch_chunks(write_indices, chunks_of(numel), stream, c, numel, selection, tallies, indices);
    return code;
}
