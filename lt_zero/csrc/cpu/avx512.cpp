#define LT_NAMESPACE lt_avx512
#include "cpu/kernels.h"

LT_TABLE(avx512)
