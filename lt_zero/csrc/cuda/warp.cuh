// Warps that work together on a block of elements.
#pragma once

#include "scalar.cuh"

namespace lt_cuda {

constexpr int kLanes = 32;
constexpr unsigned kWarpMask = 0xffffffffu;

template <class T>
LT_DEVICE T warp_max(T x) {
#pragma unroll
    for (int distance = kLanes / 2; distance > 0; distance /= 2) {
        T other = __shfl_xor_sync(kWarpMask, x, distance);
        x = other > x ? other : x;
    }
    return x;
}

}  // namespace lt_cuda
