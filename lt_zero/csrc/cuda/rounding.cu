// Stochastic rounding to bf16: lt_zero/ops/rounding.py describes it.
//
// Notes:
// - A thread has one number of Philox, whose eight half-words are for every 16th element of a group. So 16 neighbouring
//   threads have 16 neighbouring elements, which fill sectors of memory.
// - The random bits are computed in registers: 6 bytes an element are moved.
// - The step may be known on the device only, where torch's fused and capturable optimizers count.
#include "launch.cuh"

namespace lt_cuda {

constexpr int kNumbers = 16, kGroup = 128;  // numbers of Philox, and elements that have their bits

struct Rounding {
    lt_rounding given;
    int64_t groups;   // that a row touches, at most
    int64_t threads;  // in all
};

struct Words {
    uint32_t word[4];
};

// Philox4x32 with 7 rounds.
LT_DEVICE Words philox(uint64_t number, uint64_t step, uint64_t seed) {
    uint32_t a = (uint32_t)number, b = (uint32_t)(number >> 32), c = (uint32_t)step, d = (uint32_t)(step >> 32);
    uint32_t low = (uint32_t)seed, high = (uint32_t)(seed >> 32);
#pragma unroll
    for (int round = 0; round < 7; ++round) {
        const uint64_t first = (uint64_t)a * 0xd2511f53u, second = (uint64_t)c * 0xcd9e8d57u;
        a = (uint32_t)(second >> 32) ^ b ^ low;
        b = (uint32_t)second;
        c = (uint32_t)(first >> 32) ^ d ^ high;
        d = (uint32_t)first;
        low += 0x9e3779b9u;
        high += 0xbb67ae85u;
    }
    return Words{{a, b, c, d}};
}

LT_DEVICE bf16 rounded_randomly(float x, uint32_t random) {
    const uint32_t bits = __float_as_uint(x), magnitude = bits & 0x7fffffffu;
    bf16 to;
    // Beyond the largest finite number of bf16 the nearest is taken, of NaN the usual one.
    if (magnitude > 0x7f7f0000u) narrow(x, to);
    else to.bits = (uint16_t)((bits + random) >> 16);
    return to;
}

__global__ void __launch_bounds__(kThreads) rounding_kernel(const __grid_constant__ Rounding rounding) {
    const lt_rounding &t = rounding.given;
    const uint64_t step = t.counter ? (uint64_t)*t.counter : t.step;
    for (int64_t thread = (int64_t)blockIdx.x * kThreads + threadIdx.x; thread < rounding.threads;
         thread += (int64_t)gridDim.x * kThreads) {
        const int64_t number = thread % kNumbers, all = thread / kNumbers, row = all / rounding.groups;
        const int64_t start = t.first + row * t.stride;  // of the row, in the parameter
        const int64_t group = start / kGroup + all % rounding.groups;
        const Words words = philox((uint64_t)(group * kNumbers + number), step, t.seed);
#pragma unroll
        for (int half = 0; half < kGroup / kNumbers; ++half) {
            const int64_t at = group * kGroup + half * kNumbers + number - start;  // in the row
            if (at < 0 || at >= t.row) continue;
            const uint32_t word = words.word[half / 2], random = half % 2 ? word >> 16 : word & 0xffffu;
            ((bf16 *)t.dst)[row * t.row + at] = rounded_randomly(t.src[row * t.row + at], random);
        }
    }
}

}  // namespace lt_cuda

using namespace lt_cuda;

LT_EXPORT int lt_cuda_round_stochastic(const lt_rounding *t, void *stream) {
    if (!t || t->numel < 0) return LT_BAD_ARGUMENT;
    if (t->numel == 0) return LT_OK;
    if (!t->src || !t->dst || t->row < 1 || t->numel % t->row || t->first < 0 || t->stride < 0) return LT_BAD_ARGUMENT;
    const int64_t rows = t->numel / t->row, begin = rows == 1 ? t->first % kGroup : kGroup - 1;
    const int64_t groups = (begin + t->row + kGroup - 1) / kGroup, threads = rows * groups * kNumbers;
    const Rounding rounding = {*t, groups, threads};
    return launch_chunks(rounding_kernel, (threads + kThreads - 1) / kThreads, stream, rounding);
}
