// The matrix products of gemm_avx2.cpp with the dot-product instructions of AVX-512 VNNI, on 256-bit vectors.
#define FIRSTLIGHT_GEMM_SET vnni
#define FIRSTLIGHT_VNNI
#include "gemm_avx2.cpp"
