// How the functions of the C ABI share out their work. See the Notes of api.cpp.
#pragma once

#include <algorithm>
#include <atomic>
#include <new>
#include <vector>

#include "cpu/table.h"

constexpr int64_t BLOCK = 1 << 15;  // elements: long enough to stream, short enough to share out evenly
constexpr int64_t SMALL = 1 << 15;  // below this a second thread costs more than it brings

const Kernels &lt_kernels();
void lt_parallel(int threads, void (*region)(void *), void *data);

// Calls work(i) for 0 <= i < count, on several threads.
template <class Work>
void for_each_index(size_t count, int threads, Work work) {
    struct Shared {
        size_t count;
        Work &work;
        std::atomic<size_t> next{0};
    } shared{count, work};
    auto region = [](void *data) {
        Shared &s = *(Shared *)data;
        for (size_t i; (i = s.next.fetch_add(1, std::memory_order_relaxed)) < s.count;) s.work(i);
    };
    lt_parallel((int)std::min<size_t>((size_t)std::max(threads, 1), count), region, &shared);
}

// Runs `body`, which may allocate.
template <class Body>
int guarded(Body body) {
    try {
        body();
        return LT_OK;
    } catch (const std::bad_alloc &) {
        return LT_OUT_OF_MEMORY;
    }
}

inline bool is_dtype(int32_t dtype) { return dtype == LT_FP32 || dtype == LT_BF16 || dtype == LT_FP16; }

#define LT_API extern "C" __attribute__((visibility("default")))
