// The optimizers for AVX-512F; CMakeLists.txt gives this file its instruction set.
#if defined(__x86_64__) || defined(_M_X64)
#define ZEROPLAN_SIMD "simd_avx512.hpp"
#define ZEROPLAN_SET avx512
#include "optim_body.hpp"
#endif
