// Row kernels for which twice the vector pays.
#define FIRSTLIGHT_OPS_SET avx512
#include "gated_x86.h"
