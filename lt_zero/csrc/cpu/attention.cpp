// The C ABI of block-sparse attention: packs the tensors of some heads, then threads take blocks of their rows and
// columns from a counter, as in api.cpp.
#include <cmath>
#include <cstring>
#include <memory>

#include "cpu/parallel.h"

namespace {

constexpr int64_t PACKED = 16 << 20;  // bytes packed at a time, if that is more than one head

int64_t blocks_of(const lt_attention &t) { return (t.length + t.block - 1) / t.block; }

bool rows_ok(const lt_rows &t) { return t.data != nullptr; }

bool lists_ok(const lt_lists &lists, int64_t count, int64_t blocks) {
    if (!lists.begin || lists.begin[0] != 0) return false;
    for (int64_t i = 0; i < count; i++)
        if (lists.begin[i + 1] < lists.begin[i] || lists.begin[i + 1] - lists.begin[i] > blocks) return false;
    return lists.begin[count] == 0 || lists.index;
}

bool attention_ok(const lt_attention *t) {
    if (!t || t->batch < 1 || t->kv_heads < 1 || t->heads < t->kv_heads || t->heads % t->kv_heads != 0) return false;
    if (t->length < 1 || t->length > INT32_MAX - 4096 || t->dim < 1 || t->dim > 256 || t->block < 1) return false;
    if ((t->layouts != 1 && t->layouts != t->heads) || (t->dtype != LT_FP32 && t->dtype != LT_BF16)) return false;
    if (!(t->dropout >= 0.0 && t->dropout < 1.0) || !t->lse) return false;
    const int64_t count = t->layouts * blocks_of(*t);
    return rows_ok(t->q) && rows_ok(t->k) && rows_ok(t->v) && rows_ok(t->out) &&
           lists_ok(t->rows, count, blocks_of(*t));
}

// Packed tensors of some heads, one after the other, each starting at a cache line.
class Arena {
    std::unique_ptr<char[]> memory;
    char *at;

   public:
    explicit Arena(int64_t bytes) : memory(new char[(size_t)bytes + 64]) { rewind(); }
    void rewind() { at = (char *)(((uintptr_t)memory.get() + 63) / 64 * 64); }
    void *take(int64_t bytes) {
        char *taken = at;
        at += bytes;
        return taken;
    }
};

struct Job {
    const lt_rows *from;
    int64_t batch, head;
    void *to;
};

// One call: numbers of all rows, and the heads that are packed at the moment.
class Call {
   public:
    const lt_attention &t;
    const AttentionKernels &kernels = lt_kernels().attention;
    const int threads;
    const int64_t group = t.heads / t.kv_heads, units = t.batch * t.kv_heads, blocks = blocks_of(t);
    std::vector<float> key_offset, row_offset, row_delta;
    std::vector<Head> heads;

    Call(const lt_attention &t, int threads) : t(t), threads(threads) {
        key_offset.resize((size_t)(t.batch * t.length));
        for (size_t i = 0; t.key_bias && i < key_offset.size(); i++) key_offset[i] = t.key_bias[i];
    }

    // Calls work() for the query heads, some at a time. `tensors` of a group of heads that share keys and values are
    // streams then; streams_of(batch, kv head, stream) adds its heads and gets streams by stream(tensor, batch, head).
    template <class Streams, class Work>
    void for_each_pack(int64_t tensors, Streams streams_of, Work work) {
        const int64_t bytes = (kernels.packed_bytes(t) + 63) / 64 * 64;
        const int64_t most = std::min(units, std::max<int64_t>(1, PACKED / (tensors * bytes)));
        Arena arena(most * tensors * bytes);
        const int64_t pieces = (t.length + PIECE - 1) / PIECE;
        for (int64_t lo = 0; lo < units; lo += most) {
            arena.rewind();
            heads.clear();
            std::vector<Job> jobs;
            auto stream = [&](const lt_rows &from, int64_t batch, int64_t number) {
                if (const void *ready = kernels.as_it_is(t, from, batch, number)) return ready;
                jobs.push_back({&from, batch, number, arena.take(bytes)});
                return (const void *)jobs.back().to;
            };
            for (int64_t unit = lo; unit < std::min(lo + most, units); unit++)
                streams_of(unit / t.kv_heads, unit % t.kv_heads, stream);
            for_each_index(jobs.size() * (size_t)pieces, threads, [&](size_t i) {
                const Job &job = jobs[i / (size_t)pieces];
                kernels.pack(t, *job.from, job.batch, job.head, (int64_t)(i % (size_t)pieces), job.to);
            });
            work();
        }
    }

    Head head(int64_t batch, int64_t number) const {
        const size_t row = (size_t)((batch * t.heads + number) * t.length);
        Head h = {};
        h.batch = batch;
        h.head = number;
        h.key_offset = key_offset.data() + batch * t.length;
        if (!row_offset.empty()) h.row_offset = row_offset.data() + row, h.row_delta = row_delta.data() + row;
        return h;
    }
};

void forward(Call &c) {
    const lt_attention &t = c.t;
    c.for_each_pack(
        2,
        [&](int64_t batch, int64_t kv, auto stream) {
            const void *k = stream(t.k, batch, kv), *v = stream(t.v, batch, kv);
            for (int64_t i = 0; i < c.group; i++) {
                Head h = c.head(batch, kv * c.group + i);
                h.k = k, h.v = v;
                c.heads.push_back(h);
            }
        },
        [&] {
            for_each_index(c.heads.size() * (size_t)c.blocks, c.threads, [&](size_t i) {
                c.kernels.forward(t, c.heads[i / (size_t)c.blocks], (int64_t)i % c.blocks);
            });
        });
}

void backward(Call &c) {
    const lt_attention &t = c.t;
    c.row_offset.resize((size_t)(t.batch * t.heads * t.length));
    c.row_delta.resize(c.row_offset.size());
    constexpr int64_t PART = 512;
    const int64_t parts = (t.length + PART - 1) / PART;
    for_each_index((size_t)(t.batch * t.heads * parts), c.threads, [&](size_t i) {
        const int64_t row = (int64_t)i / parts, lo = (int64_t)i % parts * PART, hi = std::min(lo + PART, t.length);
        float *offset = c.row_offset.data() + row * t.length;
        const float *lse = t.lse + row * t.length;
        for (int64_t j = lo; j < hi; j++) offset[j] = lse[j] == -INFINITY ? -INFINITY : -lse[j];
        c.kernels.delta(t, row / t.heads, row % t.heads, lo, hi, c.row_delta.data() + row * t.length);
    });
    c.for_each_pack(
        2 + 2 * c.group,
        [&](int64_t batch, int64_t kv, auto stream) {
            const void *k = stream(t.k, batch, kv), *v = stream(t.v, batch, kv);
            for (int64_t i = 0; i < c.group; i++) {
                Head h = c.head(batch, kv * c.group + i);
                h.k = k, h.v = v, h.q = stream(t.q, batch, h.head), h.dout = stream(t.dout, batch, h.head);
                c.heads.push_back(h);
            }
        },
        [&] {
            const size_t rows = c.heads.size() * (size_t)c.blocks, columns = rows / (size_t)c.group;
            for_each_index(rows + columns, c.threads, [&](size_t i) {
                const size_t blocks = (size_t)c.blocks, group = (size_t)c.group;
                if (i < columns) c.kernels.backward_columns(t, &c.heads[i / blocks * group], (int64_t)(i % blocks));
                else c.kernels.backward_rows(t, &c.heads[(i - columns) / blocks], (int64_t)((i - columns) % blocks));
            });
        });
}

}  // namespace

LT_API int lt_cpu_attention_forward(const lt_attention *t, int threads) {
    if (!attention_ok(t)) return LT_BAD_ARGUMENT;
    return guarded([&] {
        Call call(*t, threads);
        forward(call);
    });
}

LT_API int lt_cpu_attention_backward(const lt_attention *t, int threads) {
    if (!attention_ok(t) || !rows_ok(t->dout) || !rows_ok(t->dq) || !rows_ok(t->dk) || !rows_ok(t->dv) ||
        !lists_ok(t->columns, t->layouts * blocks_of(*t), blocks_of(*t)))
        return LT_BAD_ARGUMENT;
    return guarded([&] {
        Call call(*t, threads);
        backward(call);
    });
}
