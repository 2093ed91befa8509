// The optimizers for any processor.
#define ZEROPLAN_SIMD "simd_plain.hpp"
#define ZEROPLAN_SET plain
#include "optim_body.hpp"
