// Attention on vectors of 16.
#define FIRSTLIGHT_ATTENTION_SET avx512
#include "attention_x86.h"
