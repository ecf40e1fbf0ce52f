// The places of the k largest magnitudes, in rising order, of equal ones the first. Magnitudes are compared as the
// integers that their bits are, so that NaN is above infinity.
//
// Three histograms find the bits of the k-th largest, from the highest 11 on to the lowest 10. Then chunks count what is
// above and what equals it, one block turns the counts into places, and chunks write their indices there. Only integers
// are added, so that no result depends on scheduling.
#include "launch.cuh"

#include "../codec.h"

namespace lt_cuda {

constexpr int kBins = 1 << 11;
constexpr int kScanThreads = 1024;
constexpr int kPerThread = (int)(kChunk / kThreads);  // neighbouring elements: indices come out in order

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
    for (int64_t i = (int64_t)blockIdx.x * kThreads + threadIdx.x; i < numel; i += (int64_t)gridDim.x * kThreads) {
        const int32_t magnitude = magnitude_bits(c[i]);
        if (digit.known(magnitude, threshold)) atomicAdd(&bins[magnitude >> digit.shift & ((1 << digit.bits) - 1)], 1u);
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

// Of a thread's elements of a chunk: body(i, magnitude).
template <class Body>
LT_DEVICE void for_each_of_thread(const float *c, int64_t numel, int64_t chunk, Body body) {
    const int64_t begin = chunk * kChunk + (int64_t)threadIdx.x * kPerThread;
    const int64_t end = begin + kPerThread < numel ? begin + kPerThread : numel;
    for (int64_t i = begin; i < end; ++i) body(i, magnitude_bits(c[i]));
}

LT_DEVICE Tally count_of_thread(const float *c, int64_t numel, int64_t chunk, int32_t threshold) {
    Tally tally = {0, 0};
    for_each_of_thread(c, numel, chunk, [&](int64_t, int32_t magnitude) {
        tally.above += magnitude > threshold;
        tally.equal += magnitude == threshold;
    });
    return tally;
}

// tallies[t] = the sum of all before t; returns the sum of all. By one thread: what it saves is less than a barrier.
template <int THREADS>
LT_DEVICE Tally exclusive_sum(Tally *tallies) {
    Tally sum = {0, 0};
    for (int t = 0; t < THREADS; ++t) {
        const Tally own = tallies[t];
        tallies[t] = sum;
        sum.above += own.above;
        sum.equal += own.equal;
    }
    return sum;
}

__global__ void __launch_bounds__(kThreads)
    count_chunks(const float *c, int64_t numel, const Selection *selection, Tally *tallies) {
    __shared__ Tally counts[kThreads];
    const int32_t threshold = selection->threshold;
    for (int64_t chunk = blockIdx.x; chunk < chunks_of(numel); chunk += gridDim.x) {
        counts[threadIdx.x] = count_of_thread(c, numel, chunk, threshold);
        __syncthreads();
        if (threadIdx.x == 0) tallies[chunk] = exclusive_sum<kThreads>(counts);
        __syncthreads();
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

__global__ void __launch_bounds__(kThreads) write_indices(const float *c, int64_t numel, const Selection *selection,
                                                          const Tally *tallies, int32_t *indices) {
    __shared__ Tally counts[kThreads];
    const int32_t threshold = selection->threshold;
    const int64_t ties = selection->rank;
    for (int64_t chunk = blockIdx.x; chunk < chunks_of(numel); chunk += gridDim.x) {
        counts[threadIdx.x] = count_of_thread(c, numel, chunk, threshold);
        __syncthreads();
        if (threadIdx.x == 0) exclusive_sum<kThreads>(counts);
        __syncthreads();
        int64_t above = tallies[chunk].above + counts[threadIdx.x].above;
        int64_t equal = tallies[chunk].equal + counts[threadIdx.x].equal;
        for_each_of_thread(c, numel, chunk, [&](int64_t i, int32_t magnitude) {
            if (magnitude < threshold) return;
            const bool tie = magnitude == threshold;
            // Before this element all larger ones are taken, and of the equal ones the first `ties`.
            if (!tie || equal < ties) indices[above + (equal < ties ? equal : ties)] = (int32_t)i;
            above += !tie;
            equal += tie;
        });
        // No barrier: until the next one, a thread reads and writes its own counts.
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
