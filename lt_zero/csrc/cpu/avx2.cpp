#define LT_NAMESPACE lt_avx2
#include "cpu/kernels.h"

LT_TABLE(avx2)
