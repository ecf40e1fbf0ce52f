// Runs the CUDA sources on the CPU: what they use of cuda_fp16.h.
#pragma once

#include <string.h>

struct __half {
    _Float16 value;
};

inline float __half2float(__half x) { return (float)x.value; }
inline __half __float2half_rn(float x) { return {(_Float16)x}; }

inline unsigned short __half_as_ushort(__half x) {
    unsigned short bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

inline __half __ushort_as_half(unsigned short bits) {
    __half x;
    memcpy(&x, &bits, sizeof x);
    return x;
}
