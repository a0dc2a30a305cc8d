// The matrix products of gemm_avx2.cpp with the dot-product instructions of AVX-512 VNNI: on 256-bit vectors where
// memory is the limit, on 512-bit ones (gemm_wide.h) where arithmetic is.
#define FIRSTLIGHT_GEMM_SET vnni
#define FIRSTLIGHT_VNNI
#include "gemm_avx2.cpp"
