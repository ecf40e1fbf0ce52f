// Multi-tensor apply: one launch works on a batch of tensors.
//
// Pointers and sizes of a batch travel in the kernel's parameters, so that a launch needs no copy to the device, no
// device memory of its own and nothing that must outlive the call. Every tensor is cut into chunks of kChunk elements,
// the chunks of a batch are numbered through, and blocks take chunks in a grid-stride loop. A chunk lies in one tensor.
//
// Notes:
// - A batch is as large as fits into the 4 KB of kernel parameters that every toolkit and driver accepts.
// - The cut depends on the sizes only, never on the GPU: sums that are taken chunk by chunk are reproducible.
// - Tensors without elements stay in the batch. They have no chunks, so no block finds them.
#pragma once

#include "scalar.cuh"

namespace lt_cuda {

constexpr int kThreads = 256;        // of a block
constexpr int64_t kChunk = 8192;     // elements: small enough to balance small models, large enough to hide the search
constexpr int kParameterBytes = 4096;
constexpr int kBatchBytes = 3840;    // leaves room for a kernel's other parameters

static_assert(kChunk % (16 * kThreads) == 0, "a whole chunk is a whole number of accesses by every thread");

LT_FN int64_t chunks_of(int64_t numel) { return numel / kChunk + (numel % kChunk != 0); }

// A caller's array of pointers, whatever it points to.
struct List {
    void *const *data;

    template <class T>
    List(T *const *list) : data((void *const *)list) {}

    void *operator[](int64_t i) const { return data ? data[i] : nullptr; }
};

// N pointers and a size for each of up to `capacity` tensors.
template <int N>
struct Batch {
    static constexpr int capacity = (kBatchBytes - 4 * (int)sizeof(int64_t)) / ((N + 2) * (int)sizeof(int64_t));

    int64_t first;                // the first tensor's place in the caller's list
    int64_t first_chunk;          // the chunks of all tensors before it
    int64_t count;
    int64_t start[capacity + 1];  // tensor i has the chunks start[i] ... start[i + 1] - 1
    int64_t numel[capacity];
    void *address[N][capacity];

    LT_FN int64_t chunks() const { return start[count]; }
};

// Fills `batch` with one part of the caller's lists after the other and calls launch() for each, until one fails.
template <int N, class Launch>
int for_each_batch(Batch<N> &batch, int64_t count, const int64_t *numel, const List (&lists)[N], Launch launch) {
    batch.first_chunk = 0;
    for (batch.first = 0; batch.first < count; batch.first += batch.count) {
        int64_t left = count - batch.first;
        batch.count = left < batch.capacity ? left : batch.capacity;
        batch.start[0] = 0;
        for (int64_t i = 0; i < batch.count; ++i) {
            batch.numel[i] = numel[batch.first + i];
            batch.start[i + 1] = batch.start[i] + chunks_of(batch.numel[i]);
            for (int list = 0; list < N; ++list) batch.address[list][i] = lists[list][batch.first + i];
        }
        if (int code = launch()) return code;
        batch.first_chunk += batch.chunks();
    }
    return LT_OK;
}

struct Chunk {
    int64_t index;       // in its batch
    int tensor;          // in its batch
    int64_t begin, end;  // elements
};

template <int N>
LT_DEVICE Chunk find_chunk(const Batch<N> &batch, int64_t index) {
    int low = 0, high = (int)batch.count;  // start[low] <= index < start[high]
    while (high - low > 1) {
        int middle = (low + high) / 2;
        if (batch.start[middle] <= index) low = middle;
        else high = middle;
    }
    int64_t begin = (index - batch.start[low]) * kChunk, left = batch.numel[low] - begin;
    return Chunk{index, low, begin, begin + (left < kChunk ? left : kChunk)};
}

template <int N>
LT_DEVICE void *address_of(const Batch<N> &batch, int list, const Chunk &chunk) {
    return batch.address[list][chunk.tensor];
}

// Every thread of a block sees the same chunks in the same order, so body() may synchronise the block.
template <int N, class Body>
LT_DEVICE void for_each_chunk(const Batch<N> &batch, Body body) {
    for (int64_t index = blockIdx.x; index < batch.chunks(); index += gridDim.x) body(find_chunk(batch, index));
}

template <int W>
struct Width {
    static constexpr int value = W;
};

// Deals a chunk's elements to the block's threads: W neighbours at a time where the tensors are aligned, and the tail
// (or, unaligned, everything) one at a time. Neighbouring threads have neighbouring elements either way.
template <int W, class Body>
LT_DEVICE void for_each_element(const Chunk &chunk, bool aligned, Body body) {
    int64_t tail = chunk.begin;
    if (aligned) {
        tail = chunk.end - (chunk.end - chunk.begin) % W;
        for (int64_t i = chunk.begin + (int64_t)threadIdx.x * W; i < tail; i += kThreads * W) body(Width<W>(), i);
    }
#pragma unroll 1  // a tail is short; an unaligned tensor is rare
    for (int64_t i = tail + threadIdx.x; i < chunk.end; i += kThreads) body(Width<1>(), i);
}

}  // namespace lt_cuda
