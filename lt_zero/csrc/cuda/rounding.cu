// Stochastic rounding to bf16: lt_zero/kernels/rounding.py describes it.
//
// Notes:
// - A thread has one number of Philox, whose eight half-words are for every 16th element of a group. So 16 neighbouring
//   threads have 16 neighbouring elements, which fill sectors of memory.
// - The random bits are computed in registers: 6 bytes an element are moved.
// - The step may be known on the device only, where torch's fused and capturable optimizers count.
#include "launch.cuh"

#include "../stochastic.h"

namespace lt_cuda {

struct Rounding {
    lt_rounding given;
    int64_t groups;   // that a row touches, at most
    int64_t threads;  // in all
};

__global__ void __launch_bounds__(kThreads) rounding_kernel(const __grid_constant__ Rounding rounding) {
    const lt_rounding &t = rounding.given;
    lt_place place = t.place;
    if (t.counter) place.step = (uint64_t)*t.counter;
    for (int64_t thread = (int64_t)blockIdx.x * kThreads + threadIdx.x; thread < rounding.threads;
         thread += (int64_t)gridDim.x * kThreads) {
        const int64_t number = thread % kNumbers, all = thread / kNumbers, row = all / rounding.groups;
        const int64_t start = place.first + row * place.stride;  // of the row, in the parameter
        const int64_t group = start / kPhiloxGroup + all % rounding.groups;
        const uint64_t counter = (uint64_t)(group * kNumbers + number);
        const Words<uint32_t> words = philox((uint32_t)counter, (uint32_t)(counter >> 32), place);
#pragma unroll
        for (int half = 0; half < kPhiloxGroup / kNumbers; ++half) {
            const int64_t at = group * kPhiloxGroup + half * kNumbers + number - start;  // in the row
            if (at < 0 || at >= place.row) continue;
            const uint32_t word = words.word[half / 2], random = half % 2 ? word >> 16 : word & 0xffffu;
            const uint32_t bits = __float_as_uint(t.src[row * place.row + at]);
            ((bf16 *)t.dst)[row * place.row + at].bits = (uint16_t)(rounded_randomly(bits, random) >> 16);
        }
    }
}

}  // namespace lt_cuda

using namespace lt_cuda;

LT_EXPORT int lt_cuda_round_stochastic(const lt_rounding *t, void *stream) {
    if (!t || t->numel < 0) return LT_BAD_ARGUMENT;
    if (t->numel == 0) return LT_OK;
    const lt_place &place = t->place;
    if (!t->src || !t->dst || place.row < 1 || t->numel % place.row || place.first < 0 || place.stride < 0)
        return LT_BAD_ARGUMENT;
    const int64_t rows = t->numel / place.row, begin = rows == 1 ? place.first % kPhiloxGroup : kPhiloxGroup - 1;
    const int64_t groups = (begin + place.row + kPhiloxGroup - 1) / kPhiloxGroup, threads = rows * groups * kNumbers;
    const Rounding rounding = {*t, groups, threads};
    return launch_chunks(rounding_kernel, (threads + kThreads - 1) / kThreads, stream, rounding);
}
