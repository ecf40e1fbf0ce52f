// A canonical Huffman coder for bytes. lt_zero/kernels/huffman.py describes the format and has the reference.
//
// Decoding trusts nothing: lengths are checked before tables are made of them, and no index is formed from the input
// that is not checked against the end of what it addresses.
#include <algorithm>
#include <array>
#include <cstddef>
#include <cstring>
#include <vector>

#include "cpu/parallel.h"

namespace {

constexpr int SYMBOLS = 256, MOST_BITS = 12, TABLE = 1 << MOST_BITS;
constexpr int64_t HEADER = 9;  // stored or coded, then the number of bytes before coding
constexpr uint8_t STORED = 0, CODED = 1;

typedef std::array<uint8_t, SYMBOLS> Lengths;
typedef std::array<uint16_t, SYMBOLS> Words;

void count_bytes(const uint8_t *in, int64_t n, uint64_t (&total)[SYMBOLS]) {
    // Four tables: with one, equal neighbours would wait for each other's increments of the same count.
    std::vector<uint64_t> counts(4 * SYMBOLS);
    int64_t i = 0;
    for (; i + 4 <= n; i += 4)
        for (int k = 0; k < 4; k++) counts[(size_t)(k * SYMBOLS + in[i + k])]++;
    for (; i < n; i++) counts[in[i]]++;
    for (size_t s = 0; s < SYMBOLS; s++)
        total[s] = counts[s] + counts[s + SYMBOLS] + counts[s + 2 * SYMBOLS] + counts[s + 3 * SYMBOLS];
}

// Optimal lengths of at most MOST_BITS: package-merge (Larmore, Hirschberg, JACM 37, 1990). Each level merges the symbols
// with pairs of the level below; only which of them are symbols is kept, which is all that counting back needs.
Lengths optimal_lengths(const uint64_t (&counts)[SYMBOLS]) {
    std::vector<int> order;
    for (int s = 0; s < SYMBOLS; s++)
        if (counts[s] > 0) order.push_back(s);
    // Ties are broken as in the reference, here and in the merges below: both have to find the same lengths.
    std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return counts[a] < counts[b]; });
    Lengths lengths = {};
    if (order.size() == 1) lengths[(size_t)order[0]] = 1;
    if (order.size() < 2) return lengths;
    std::vector<std::vector<bool>> is_symbol(MOST_BITS);
    std::vector<uint64_t> below;
    for (auto &level : is_symbol) {
        std::vector<uint64_t> merged;
        size_t symbol = 0, pair = 0;
        while (symbol < order.size() || 2 * pair + 1 < below.size()) {
            const bool pairs_left = 2 * pair + 1 < below.size();
            // A pair counts as much as both of its members. At equal weights the symbol comes first.
            const uint64_t weight = pairs_left ? below[2 * pair] + below[2 * pair + 1] : 0;
            const bool take = symbol < order.size() && (!pairs_left || counts[order[symbol]] <= weight);
            level.push_back(take);
            merged.push_back(take ? counts[order[symbol++]] : weight);
            pair += !take;
        }
        below.swap(merged);
    }
    size_t wanted = 2 * order.size() - 2;
    for (auto level = is_symbol.rbegin(); level != is_symbol.rend(); ++level) {
        const size_t symbols = (size_t)std::count(level->begin(), level->begin() + (std::ptrdiff_t)wanted, true);
        for (size_t i = 0; i < symbols; i++) lengths[(size_t)order[i]]++;
        wanted = 2 * (wanted - symbols);
    }
    return lengths;
}

// Canonical code words with their first bit lowest; false if the lengths are those of no prefix code.
bool make_words(const Lengths &lengths, Words &words) {
    uint32_t next = 0;
    for (int bits = 1; bits <= MOST_BITS; bits++, next <<= 1)
        for (size_t s = 0; s < SYMBOLS; s++) {
            if (lengths[s] != bits) continue;
            if (next >> bits) return false;
            uint32_t reversed = 0;
            for (int b = 0; b < bits; b++) reversed |= (next >> b & 1) << (bits - 1 - b);
            words[s] = (uint16_t)reversed;
            next++;
        }
    return true;
}

// A byte for each run of up to 16 symbols of equal length: the length, then the run less one.
std::vector<uint8_t> pack_lengths(const Lengths &lengths) {
    std::vector<uint8_t> packed;
    for (size_t s = 0, run; s < SYMBOLS; s += run) {
        for (run = 1; run < 16 && s + run < SYMBOLS && lengths[s + run] == lengths[s];) run++;
        packed.push_back((uint8_t)(lengths[s] << 4 | (run - 1)));
    }
    return packed;
}

// The bytes that were read; -1 if they are damaged.
int64_t unpack_lengths(const uint8_t *in, int64_t nbytes, Lengths &lengths) {
    int64_t at = 0;
    for (size_t s = 0; s < SYMBOLS; at++) {
        if (at >= nbytes) return -1;
        const size_t run = (size_t)(in[at] & 15) + 1;
        if (in[at] >> 4 > MOST_BITS || s + run > SYMBOLS) return -1;
        for (size_t end = s + run; s < end; s++) lengths[s] = in[at] >> 4;
    }
    return at;
}

void write_header(uint8_t *out, uint8_t kind, int64_t n) {
    out[0] = kind;
    std::memcpy(out + 1, &n, 8);
}

uint8_t *write_words(const uint8_t *in, int64_t n, const Lengths &lengths, const Words &words, uint8_t *out) {
    uint64_t held = 0;
    int bits = 0;
    for (int64_t i = 0; i < n; i++) {
        // At most 31 bits are left over when a word of up to 12 is added.
        held |= (uint64_t)words[in[i]] << bits;
        bits += lengths[in[i]];
        for (; bits >= 32; bits -= 32, held >>= 32, out += 4) std::memcpy(out, &held, 4);
    }
    for (; bits > 0; bits -= 8, held >>= 8) *out++ = (uint8_t)held;
    return out;
}

struct Entry {
    uint8_t symbol, bits;  // 0 bits: no code word begins like this
};

struct Bits {
    const uint8_t *in;
    int64_t nbytes, position = 0;  // in bits

    uint64_t peek() const {  // 57 bits or more, zeros beyond the end
        const int64_t byte = position >> 3;
        uint64_t x = 0;
        if (byte + 8 <= nbytes) std::memcpy(&x, in + byte, 8);
        else if (byte < nbytes) std::memcpy(&x, in + byte, (size_t)(nbytes - byte));
        return x >> (position & 7);
    }
};

// Whether `bits` held exactly n code words.
bool read_words(Bits bits, const std::vector<Entry> &table, uint8_t *out, int64_t n) {
    constexpr int AT_ONCE = 4;  // words in the 57 bits of one access
    for (int64_t i = 0; i < n;) {
        // Beyond the end there are zeros, which may be words, too: it is enough to check the end once for all words of
        // one access.
        uint64_t x = bits.peek();
        for (int64_t end = std::min<int64_t>(i + AT_ONCE, n); i < end; i++) {
            const Entry entry = table[x & (TABLE - 1)];
            if (entry.bits == 0) return false;
            out[i] = entry.symbol;
            x >>= entry.bits;
            bits.position += entry.bits;
        }
        if (bits.position > 8 * bits.nbytes) return false;
    }
    return (bits.position + 7) / 8 == bits.nbytes;
}

}  // namespace

LT_API int lt_cpu_huffman_encode(const uint8_t *in, int64_t n, uint8_t *out, int64_t *used) {
    if (n < 0 || (n > 0 && !in) || !out || !used) return LT_BAD_ARGUMENT;
    return guarded([&] {
        uint64_t counts[SYMBOLS], total = 0;
        count_bytes(in, n, counts);
        const Lengths lengths = optimal_lengths(counts);
        const std::vector<uint8_t> packed = pack_lengths(lengths);
        for (size_t s = 0; s < SYMBOLS; s++) total += counts[s] * lengths[s];
        Words words = {};
        if ((int64_t)(packed.size() + (total + 7) / 8) < n && make_words(lengths, words)) {
            write_header(out, CODED, n);
            std::copy(packed.begin(), packed.end(), out + HEADER);
            *used = write_words(in, n, lengths, words, out + HEADER + packed.size()) - out;
        } else {
            write_header(out, STORED, n);
            if (n > 0) std::memcpy(out + HEADER, in, (size_t)n);
            *used = HEADER + n;
        }
    });
}

LT_API int64_t lt_cpu_huffman_size(const uint8_t *in, int64_t nbytes) {
    int64_t n;
    if (!in || nbytes < HEADER) return -1;
    std::memcpy(&n, in + 1, 8);
    return n;
}

LT_API int lt_cpu_huffman_decode(const uint8_t *in, int64_t nbytes, uint8_t *out, int64_t n) {
    if (!in || n < 0 || (n > 0 && !out)) return LT_BAD_ARGUMENT;
    if (lt_cpu_huffman_size(in, nbytes) != n) return LT_CORRUPT;
    int code = LT_CORRUPT;
    const uint8_t kind = in[0];
    in += HEADER;
    nbytes -= HEADER;
    if (kind == STORED) {
        if (nbytes != n) return LT_CORRUPT;
        if (n > 0) std::memcpy(out, in, (size_t)n);
        return LT_OK;
    }
    if (kind != CODED) return LT_CORRUPT;
    const int failed = guarded([&] {
        Lengths lengths;
        Words words = {};
        const int64_t begin = unpack_lengths(in, nbytes, lengths);
        if (begin < 0 || !make_words(lengths, words)) return;
        std::vector<Entry> table(TABLE);
        for (size_t s = 0; s < SYMBOLS; s++)
            // The bits behind a word are those of the next one: whatever they are, they lead to this entry.
            for (size_t w = words[s]; lengths[s] > 0 && w < TABLE; w += (size_t)1 << lengths[s])
                table[w] = Entry{(uint8_t)s, lengths[s]};
        if (read_words(Bits{in + begin, nbytes - begin}, table, out, n)) code = LT_OK;
    });
    return failed ? failed : code;
}
