#define LT_NAMESPACE lt_portable
#include "cpu/kernels.h"

LT_TABLE(portable)
