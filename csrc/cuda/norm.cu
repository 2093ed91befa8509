// The gradient's sum of squares in one pass, and what follows from it: norm, overflow, clip factor.
#include "common.cuh"

namespace zp {

// Adds up this thread's squares over [0, n). V * U fp32 accumulators a thread keep chains short and loads in flight.
template <int V, int U>
__device__ inline double thread_squares(const ZP_GRAD* __restrict__ g, i64 n, i64 head) {
    const i64 packs = (n - head) / V;
    const i64 tile = static_cast<i64>(blockDim.x) * U;
    float sum[U][V] = {};
    for (i64 first = blockIdx.x * tile; first < packs; first += gridDim.x * tile) {
        float x[U][V];
#pragma unroll
        for (int u = 0; u < U; ++u) {
            const i64 i = first + u * static_cast<i64>(blockDim.x) + threadIdx.x;
            if (i < packs) {
                read<V>(g + head + i * V, x[u]);
            } else {
#pragma unroll
                for (int k = 0; k < V; ++k) x[u][k] = 0.0f;
            }
        }
#pragma unroll
        for (int u = 0; u < U; ++u) {
#pragma unroll
            for (int k = 0; k < V; ++k) sum[u][k] = fmaf(x[u][k], x[u][k], sum[u][k]);
        }
    }
    double total = 0.0;
#pragma unroll
    for (int u = 0; u < U; ++u) {
        // Adds pairs in fp32, then in fp64: few conversions, and no loss beyond that of the accumulation.
#pragma unroll
        for (int k = 0; k < V; k += 2) total += V == 1 ? sum[u][k] : sum[u][k] + sum[u][(k + 1) % V];
    }
    const i64 tail = head + packs * V, edge = head + (n - tail);
    for (i64 k = blockIdx.x * static_cast<i64>(blockDim.x) + threadIdx.x; k < edge; k += gridDim.x * static_cast<i64>(blockDim.x)) {
        float x[1];
        read<1>(g + (k < head ? k : tail + (k - head)), x);
        total += static_cast<double>(x[0]) * x[0];
    }
    return total;
}

} // namespace zp

// squares = (accumulate ? squares : 0) + sum of g². Deterministic for a given n, alignment and grid: every block leaves its
// part in partial[block], and the last to arrive adds them in order. ticket[0] is 0 before and after.
extern "C" __global__ void __launch_bounds__(ZP_THREADS)
    zp_sum_of_squares(const ZP_GRAD* g, long long n, long long head, double* partial, unsigned int* ticket, zp::Scalars* scalars,
                      int accumulate) {
    const double mine = zp::block_sum(zp::thread_squares<ZP_VEC, ZP_UNROLL>(g, n, head));
    __shared__ bool last;
    if (threadIdx.x == 0) {
        partial[blockIdx.x] = mine;
        __threadfence();
        last = atomicInc(ticket, gridDim.x - 1) == gridDim.x - 1;
    }
    __syncthreads();
    if (!last) return;
    __threadfence();
    double sum = 0.0;
    for (unsigned int i = threadIdx.x; i < gridDim.x; i += blockDim.x) sum += __ldcg(partial + i);
    sum = zp::block_sum(sum);
    if (threadIdx.x == 0) scalars->squares = static_cast<float>(accumulate ? scalars->squares + sum : sum);
}

// Computes norm, factor and skip from the sum of squares over all ranks, with one thread, in fp64. max_norm <= 0: no clipping,
// else as torch.nn.utils.clip_grad_norm_. An infinite or NaN sum is an overflow; it skips the step where may_skip is set.
extern "C" __global__ void zp_finalize(zp::Scalars* scalars, double max_norm, double loss_scale, int may_skip) {
    const double sum = scalars->squares, norm = sqrt(sum) / loss_scale;
    double clip = 1.0;
    if (max_norm > 0.0) {
        clip = max_norm / (norm + 1e-6);
        if (clip > 1.0) clip = 1.0;
    }
    scalars->norm = static_cast<float>(norm);
    scalars->factor = static_cast<float>(clip / loss_scale);
    scalars->skip = may_skip && !(sum <= 1.7976931348623157e308) ? 1.0f : 0.0f;
}
