// A step of Adam with moments in 8 bits, a block at a time: decoded into the first cache, updated, encoded.
#pragma once

#include "cpu/vec.h"
#include "coded.h"

namespace LT_NAMESPACE {

static void decode_moments(const Coding &coding, const uint8_t *record, int count, float *values) {
    float scale;
    memcpy(&scale, record + kCoded, sizeof scale);
    for (int i = 0; i < count; i++) values[i] = decoded(coding, record[i], scale);
}

static void encode_moments(const Coding &coding, uint8_t *record, int count, const float *values) {
    uint32_t largest = 0;
    for (int i = 0; i < count; i++) {
        uint32_t bits = bits_of(values[i]) & 0x7fffffffu;
        largest = bits > largest ? bits : largest;
    }
    const float scale = scale_of(largest);
    memcpy(record + kCoded, &scale, sizeof scale);
    if (!(scale > 0.0f)) {
        memset(record, 0, (size_t)count);
        return;
    }
    for (int i = 0; i < count; i++) record[i] = encoded(coding, values[i], scale);
}

// [lo, hi) of a tensor; lo is a multiple of a block.
template <class Row, class Rule>
static void coded_adam(const lt_tensors &t, const Row &row, const Rule &rule, int64_t lo, int64_t hi) {
    const Coding first = make_coding(t.levels, t.starts, true), second = make_coding(t.levels, t.starts, false);
    alignas(64) float m[kCoded], v[kCoded];
    for (int64_t begin = lo; begin < hi; begin += kCoded) {
        const int count = hi - begin < kCoded ? (int)(hi - begin) : kCoded;
        uint8_t *record1 = (uint8_t *)row.state1 + begin / kCoded * kRecord;
        uint8_t *record2 = (uint8_t *)row.state2 + begin / kCoded * kRecord;
        decode_moments(first, record1, count, m);
        decode_moments(second, record2, count, v);
        for_each_vector(begin, begin + count, [&](auto at, int64_t i) {
            Vec p = at.load(row.param, LT_FP32, i), g = row.gradient(at, i);
            Vec own_m = at.load(m, LT_FP32, i - begin), own_v = at.load(v, LT_FP32, i - begin);
            update(rule, p, g, own_m, own_v);
            at.store(m, LT_FP32, i - begin, own_m);
            at.store(v, LT_FP32, i - begin, own_v);
            row.finish(at, i, p);
        });
        encode_moments(first, record1, count, m);
        encode_moments(second, record2, count, v);
    }
}

}  // namespace LT_NAMESPACE
