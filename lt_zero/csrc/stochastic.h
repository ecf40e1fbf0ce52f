// Stochastic rounding to bf16: what the CPU's and CUDA's kernels share. lt_zero/kernels/rounding.py describes it.
//
// Written once over a type U of 32-bit words: a vector of them on the CPU, uint32_t on CUDA.
#pragma once

#include <stdint.h>

#include "lt_zero.h"

#ifndef LT_FN
#define LT_FN static inline
#endif

namespace LT_NAMESPACE {

constexpr int kNumbers = 16, kPhiloxGroup = 128;  // numbers of Philox, and elements that have their bits

LT_FN uint32_t upper_product(uint32_t a, uint32_t b) { return (uint32_t)((uint64_t)a * b >> 32); }

template <class U>
struct Words {
    U word[4];
};

// Philox4x32 with 7 rounds, of a number in two words.
template <class U>
LT_FN Words<U> philox(U low, U high, const lt_place &place) {
    U a = low, b = high, c = U{} + (uint32_t)place.step, d = U{} + (uint32_t)(place.step >> 32);
    uint32_t key = (uint32_t)place.seed, upper_key = (uint32_t)(place.seed >> 32);
    for (int round = 0; round < 7; round++) {
        const U first = upper_product(a, 0xd2511f53u), second = upper_product(c, 0xcd9e8d57u);
        const U first_low = a * 0xd2511f53u, second_low = c * 0xcd9e8d57u;
        a = second ^ b ^ key;
        b = second_low;
        c = first ^ d ^ upper_key;
        d = first_low;
        key += 0x9e3779b9u;
        upper_key += 0xbb67ae85u;
    }
    return Words<U>{{a, b, c, d}};
}

// Rounds the bits of fp32 numbers to bf16, the upper halves of the result, by 16 random bits. Beyond bf16's largest finite
// number the nearest is taken, of NaN the usual one.
template <class U>
LT_FN U rounded_randomly(U bits, U random) {
    const U magnitude = bits & 0x7fffffffu, nearest = bits + 0x7fffu + (bits >> 16 & 1u);
    const U rounded = magnitude > 0x7f7f0000u ? nearest : bits + random;
    return magnitude > 0x7f800000u ? U{} + 0x7fc00000u : rounded;
}

// Elements that follow each other in their parameter from element `i` of a tensor on, which is in the place.
struct Stretch {
    int64_t index;  // of the first one in the parameter
    int64_t count;  // up to the end of the row
};

LT_FN Stretch stretch_from(const lt_place &place, int64_t i) {
    const int64_t at = i - place.begin;
    if (at < place.row) return Stretch{place.first + at, place.row - at};  // most parameters are one row
    const int64_t row = at / place.row, within = at - row * place.row;
    return Stretch{place.first + row * place.stride + within, place.row - within};
}

// The place of one element of a tensor after the other.
struct PlaceCursor {
    const lt_place *place, *end;
    int64_t next;  // the first element behind the place
};

LT_FN PlaceCursor cursor_at(const lt_place *place, const lt_place *end) {
    const lt_place *following = place + 1;
    const bool last = following == end || following->tensor != place->tensor;
    return PlaceCursor{place, end, last ? INT64_MAX : following->begin};
}

LT_FN PlaceCursor find_place(const lt_place *places, int64_t count, int64_t tensor, int64_t i) {
    int64_t low = 0, high = count;  // element `i` is not before places[low], and before places[high]
    while (high - low > 1) {
        const int64_t middle = (low + high) / 2;
        const lt_place &place = places[middle];
        if (place.tensor < tensor || (place.tensor == tensor && place.begin <= i)) low = middle;
        else high = middle;
    }
    return cursor_at(places + low, places + count);
}

// Moves on to the place of element `i`, which is not before the place of the cursor.
LT_FN void move_to(PlaceCursor &cursor, int64_t i) {
    while (i >= cursor.next) cursor = cursor_at(cursor.place + 1, cursor.end);
}

// 16 random bits of element `i` alone, which is not before those that the cursor was moved to.
LT_FN uint32_t random_bits(PlaceCursor &cursor, int64_t i) {
    move_to(cursor, i);
    const int64_t index = stretch_from(*cursor.place, i).index;
    const uint64_t number = (uint64_t)(index / kPhiloxGroup * kNumbers + index % kNumbers);
    const Words<uint32_t> words = philox((uint32_t)number, (uint32_t)(number >> 32), *cursor.place);
    const int half = (int)(index % kPhiloxGroup / kNumbers);
    // Choices instead of an index, which would put the words into memory.
    const uint32_t low = half < 2 ? words.word[0] : words.word[1], high = half < 6 ? words.word[2] : words.word[3];
    const uint32_t word = half < 4 ? low : high;
    return half % 2 ? word >> 16 : word & 0xffffu;
}

}  // namespace LT_NAMESPACE
