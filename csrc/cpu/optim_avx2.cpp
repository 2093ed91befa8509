// The optimizers for AVX2 with F16C; CMakeLists.txt gives this file its instruction set.
#if defined(__x86_64__) || defined(_M_X64)
#define ZEROPLAN_SIMD "simd_avx2.hpp"
#define ZEROPLAN_SET avx2
#include "optim_body.hpp"
#endif
