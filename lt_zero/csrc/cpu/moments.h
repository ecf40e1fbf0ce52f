// A step of Adam with moments in 8 bits, a block at a time: updated values stay in the first cache until the scale is
// known.
#pragma once

#include "coded.h"
#include "cpu/vec.h"

namespace LT_NAMESPACE {

template <bool SIGNED>
static inline Vec decode_moments(const Coding<SIGNED> &coding, const uint8_t *codes, Vec scale) {
    const Ints code = from_bytes(codes);
    if constexpr (!SIGNED) return look_up<256>(coding.levels, code) * scale;
    const Ints level = (Ints)look_up<128>(coding.levels, code & 127).x;
    return Vec((Lanes)(level | (Ints)((Bits)(code & 128) << 24))) * scale;
}

template <bool SIGNED>
static void encode_moments(const Coding<SIGNED> &coding, uint8_t *record, const float *values) {
    Ints largest = {};
    for (int i = 0; i < kCoded; i += W) largest = larger(largest, magnitude_bits(load(values, LT_FP32, i)));
    const float scale = scale_of((uint32_t)largest_lane(largest));
    memcpy(record + kCoded, &scale, sizeof scale);
    if (!(scale > 0.0f)) {
        memset(record, 0, kCoded);
        return;
    }
    for (int i = 0; i < kCoded; i += W) {
        const Vec ratio = load(values, LT_FP32, i) / Vec(scale);
        const Ints bits = magnitude_bits(ratio), sign = (Ints)ratio.x & INT32_MIN;
        Ints code = __builtin_convertvector(near_code<SIGNED>(Vec((Lanes)bits)).x, Ints);
        code -= (Lanes)bits > look_up<SIGNED ? 128 : 256>(coding.middles, code).x;  // a mask is -1
        if constexpr (SIGNED) {
            code |= (Ints)((Bits)sign >> 24) & (code > 0);
        } else {
            code -= (code == 0) & (bits != 0);
            code &= sign == 0;
        }
        to_bytes(record + i, code);
    }
}

// [lo, hi) of a tensor; lo is a multiple of a block.
template <class Row, class Rule>
static void coded_adam(const lt_tensors &t, Row row, const Rule &rule, int64_t lo, int64_t hi) {
    const Coding<true> first = make_coding<true>(t.levels);
    const Coding<false> second = make_coding<false>(t.levels);
    alignas(64) float m[kCoded] = {}, v[kCoded] = {};
    for (int64_t begin = lo; begin < hi; begin += kCoded) {
        const int64_t end = begin + kCoded < hi ? begin + kCoded : hi;
        uint8_t *record1 = (uint8_t *)row.state1 + begin / kCoded * kRecord;
        uint8_t *record2 = (uint8_t *)row.state2 + begin / kCoded * kRecord;
        float scale1, scale2;
        memcpy(&scale1, record1 + kCoded, sizeof scale1);
        memcpy(&scale2, record2 + kCoded, sizeof scale2);
        if (end - begin < kCoded) {  // what follows the last element is encoded as zeros
            memset(m, 0, sizeof m);
            memset(v, 0, sizeof v);
        }
        row.for_each(begin, end, [&](auto at, int64_t i) {
            Vec p = row.weights(at, i), g = row.gradient(at, i);
            Vec own_m = decode_moments(first, record1 + (i - begin), Vec(scale1));
            Vec own_v = decode_moments(second, record2 + (i - begin), Vec(scale2));
            update(rule, p, g, own_m, own_v);
            at.store(m, LT_FP32, i - begin, own_m);
            at.store(v, LT_FP32, i - begin, own_v);
            row.finish(at, i, p);
        });
        encode_moments(first, record1, m);
        encode_moments(second, record2, v);
    }
}

}  // namespace LT_NAMESPACE
