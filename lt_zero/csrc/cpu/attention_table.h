// What each instruction set offers to attention.cpp: pieces of one head.
#pragma once

#include "lt_zero.h"

constexpr int64_t PIECE = 32;  // rows that are packed together

// One query head with its keys and values, and numbers for each row.
struct Head {
    int64_t batch, head;               // of the queries
    const float *key_offset;           // [length] is added to the scores of a key
    const float *row_offset;           // [length] -lse; -infinity if the row sees nothing
    const float *row_delta;            // [length] sum of out * dout
    const void *q, *k, *v, *dout;      // streams, see products.h
};

struct AttentionKernels {
    // A head's tensor as a stream: its bytes, itself if it has that form (or NULL), and the packing of a piece.
    int64_t (*packed_bytes)(const lt_attention &);
    const void *(*as_it_is)(const lt_attention &, const lt_rows &, int64_t batch, int64_t head);
    void (*pack)(const lt_attention &, const lt_rows &, int64_t batch, int64_t head, int64_t piece, void *);
    // Of rows [lo, hi): sum of out * dout.
    void (*delta)(const lt_attention &, int64_t batch, int64_t head, int64_t lo, int64_t hi, float *delta);
    // One block of rows: out and lse; dq. One block of columns: dk and dv, of the `group` heads that share them.
    void (*forward)(const lt_attention &, const Head &, int64_t block);
    void (*backward_rows)(const lt_attention &, const Head *, int64_t block);
    void (*backward_columns)(const lt_attention &, const Head *group, int64_t block);
};
