// The arguments of the optimizers' C interface, and the table of range functions that each instruction set fills.
//
// Buffers are flat and of equal length. A 16-bit gradient or output is passed as raw bits. Every product, sum, root and
// quotient is rounded to fp32 on its own, in the order of csrc/cuda/*.cu (Note [Arithmetic] there), so all paths give the
// same bits; -ffp-contract=off holds the compiler to it.
#pragma once

#include <cstddef>
#include <cstdint>

extern "C" {

enum ZeroplanType : std::int32_t { ZEROPLAN_NONE = -1, ZEROPLAN_FP32 = 0, ZEROPLAN_BF16 = 1, ZEROPLAN_FP16 = 2 };

// One optimizer step over [0, n). first, second: the states (exp_avg and exp_avg_sq, momentum, …); null where unused.
struct ZeroplanStep {
    float* param;
    const void* grad;
    float* first;
    float* second;
    void* out; // the parameter in the model's dtype, or null
    std::int64_t n;
    std::int32_t grad_type;
    std::int32_t out_type;
    float scale; // multiplies the gradient
    float beta1, one_minus_beta1, beta2, one_minus_beta2;
    float root2; // 1 / sqrt(1 - beta2^t)
    float eps;
    float l2;   // adds l2 * param to the gradient, in LAMB to the direction
    float keep; // multiplies the parameter: 1 - lr * weight decay, or 1
    float rate; // the step size
    std::int32_t nesterov;
};

// One AdamW step with its moments in blocks of codes: Note [Blockwise states] in
// zeroplan_runtime/kernels/block_quantisation.py. step.first and step.second are null, step.n whole blocks.
struct ZeroplanBlockwise {
    ZeroplanStep step;
    std::uint8_t* first;  // codes of the moments, two a byte where bits is 4
    std::uint8_t* second;
    float* scales;        // [n / block][2]
    const std::uint32_t* maps; // levels of both moments, then bins of both
    std::int32_t bits;
    std::int32_t block;
};

// One conversion with scaling over [0, n).
struct ZeroplanCast {
    const void* source;
    void* out;
    std::int64_t n;
    std::int32_t source_type;
    std::int32_t out_type;
    float scale;
};
}

namespace zeroplan {

using StepRange = void (*)(const ZeroplanStep&, std::size_t begin, std::size_t end);

// One instruction set's routines. Ranges begin on a multiple of 64 elements.
struct Kernels {
    const char* name;
    StepRange adam;
    void (*adam_blockwise)(const ZeroplanBlockwise&, std::size_t begin, std::size_t end);
    StepRange lion;
    StepRange sgd;
    // sums[0] += ‖p‖², sums[1] += ‖direction‖² of the range, which may begin anywhere.
    void (*lamb_moments)(const ZeroplanStep&, std::size_t begin, std::size_t end, double sums[2]);
    StepRange lamb_apply;
    void (*cast)(const ZeroplanCast&, std::size_t begin, std::size_t end);
    // Sum of squares, the same bits on every instruction set.
    double (*sum_of_squares)(const void* values, std::int32_t type, std::size_t begin, std::size_t end);
};

extern const Kernels kernels_plain;
#if defined(__x86_64__) || defined(_M_X64)
extern const Kernels kernels_avx2;
extern const Kernels kernels_avx512;
#endif

// The routines of the instruction set in use.
const Kernels& chosen_kernels();

} // namespace zeroplan
