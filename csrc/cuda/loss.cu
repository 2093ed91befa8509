// Cross entropy of rows of logits against class labels: one pass forward, one pass backward, fp32 inside, nothing in between.
//
// A row is one token's logits over the vocabulary; a block processes one row. torch needs six passes and two fp32 copies of the
// logits (cast, log-softmax, pick; scatter, log-softmax backward, cast). Here each direction reads the logits once.
#include "common.cuh"

namespace zp {

// max, and sum of exp(x - max): the online softmax of Milakov and Gimelshein 2018, algorithm 3.
struct Peak {
    float max = -3.402823466e38f; // finite, so that an empty part is exp(0) * 0
    float sum = 0.0f;
};

__device__ inline void add(Peak& a, float max, float sum) {
    const float top = fmaxf(a.max, max);
    a.sum = a.sum * expf(a.max - top) + sum * expf(max - top);
    a.max = top;
}

template <int V>
__device__ inline void take(Peak& a, const float (&x)[V]) {
    float top = a.max;
#pragma unroll
    for (int k = 0; k < V; ++k) top = fmaxf(top, x[k]);
    float sum = 0.0f;
#pragma unroll
    for (int k = 0; k < V; ++k) sum += expf(x[k] - top);
    a.sum = a.sum * expf(a.max - top) + sum;
    a.max = top;
}

// Joins the threads' peaks; every thread gets the result.
__device__ inline Peak block_peak(Peak a) {
    __shared__ float tops[32], sums[32];
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2)
        add(a, __shfl_xor_sync(0xffffffffu, a.max, offset), __shfl_xor_sync(0xffffffffu, a.sum, offset));
    if (threadIdx.x % 32 == 0) tops[threadIdx.x / 32] = a.max, sums[threadIdx.x / 32] = a.sum;
    __syncthreads();
    Peak all;
    for (int w = 0; w < static_cast<int>(blockDim.x / 32); ++w) add(all, tops[w], sums[w]);
    return all;
}

// Counts the elements of a row before the first that is aligned for vector access.
__device__ inline i64 head_of(const ZP_GRAD* row, i64 n) {
    const i64 head = ((16 - reinterpret_cast<unsigned long long>(row) % 16) % 16) / sizeof(ZP_GRAD);
    return head < n ? head : n;
}

} // namespace zp

// lse[row] = log sum exp(logits[row]), loss[row] = lse[row] - logits[row][label]. A row whose label is `ignore` is not read
// and gives 0; a label outside the vocabulary gives NaN.
extern "C" __global__ void __launch_bounds__(ZP_THREADS)
    zp_cross_entropy(const ZP_GRAD* logits, const long long* labels, long long vocab, long long ignore, float* lse, float* loss) {
    const long long row = blockIdx.x, label = labels[row];
    if (label == ignore) {
        if (threadIdx.x == 0) lse[row] = 0.0f, loss[row] = 0.0f;
        return;
    }
    const ZP_GRAD* x = logits + row * vocab;
    const long long head = zp::head_of(x, vocab), packs = (vocab - head) / ZP_VEC, tail = head + packs * ZP_VEC;
    zp::Peak peak;
    for (long long i = threadIdx.x; i < packs; i += blockDim.x) {
        float values[ZP_VEC];
        zp::read<ZP_VEC>(x + head + i * ZP_VEC, values);
        zp::take(peak, values);
    }
    for (long long k = threadIdx.x; k < head + (vocab - tail); k += blockDim.x) {
        float value[1];
        zp::read<1>(x + (k < head ? k : tail + (k - head)), value);
        zp::take(peak, value);
    }
    peak = zp::block_peak(peak);
    if (threadIdx.x == 0) {
        const float whole = peak.max + logf(peak.sum);
        float chosen[1] = {__int_as_float(0x7fc00000)};
        if (label >= 0 && label < vocab) zp::read<1>(x + label, chosen);
        lse[row] = whole;
        loss[row] = whole - chosen[0];
    }
}

// grad[row][i] = (exp(logits[row][i] - lse[row]) - [i == label]) * scale[0]; zeros where the label is `ignore`. `grad` is
// aligned as `logits` is.
extern "C" __global__ void __launch_bounds__(ZP_THREADS)
    zp_cross_entropy_grad(const ZP_GRAD* logits, const long long* labels, long long vocab, long long ignore, const float* lse,
                          const float* scale, ZP_GRAD* grad) {
    const long long row = blockIdx.x, label = labels[row];
    const bool counts = label != ignore;
    const float whole = lse[row], factor = scale[0];
    const ZP_GRAD* x = logits + row * vocab;
    ZP_GRAD* g = grad + row * vocab;
    const long long head = zp::head_of(x, vocab), packs = (vocab - head) / ZP_VEC, tail = head + packs * ZP_VEC;
    for (long long i = threadIdx.x; i < packs; i += blockDim.x) {
        const long long first = head + i * ZP_VEC;
        float values[ZP_VEC];
        zp::read<ZP_VEC>(x + first, values);
#pragma unroll
        for (int k = 0; k < ZP_VEC; ++k)
            values[k] = counts ? (expf(values[k] - whole) - (first + k == label ? 1.0f : 0.0f)) * factor : 0.0f;
        zp::write<ZP_VEC>(g + first, values);
    }
    for (long long k = threadIdx.x; k < head + (vocab - tail); k += blockDim.x) {
        const long long i = k < head ? k : tail + (k - head);
        float value[1];
        zp::read<1>(x + i, value);
        value[0] = counts ? (expf(value[0] - whole) - (i == label ? 1.0f : 0.0f)) * factor : 0.0f;
        zp::write<1>(g + i, value);
    }
}
