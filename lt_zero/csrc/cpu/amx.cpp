// Attention for CPUs with AVX-512 and AMX; all else is that of avx512.cpp.
#include "cpu/table.h"

#if (defined(__clang__) && __clang_major__ >= 12) || (!defined(__clang__) && __GNUC__ >= 11)
#define LT_NAMESPACE lt_amx
#define LT_TILES
#include "cpu/attention.h"

const AttentionKernels lt_attention_amx = lt_amx::attention;
#else
const AttentionKernels lt_attention_amx = {};  // assemblers of that age do not know the instructions
#endif
