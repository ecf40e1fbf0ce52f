#define LT_NAMESPACE lt_neon
#include "cpu/kernels.h"

LT_TABLE(neon)
