// The gradient's sum of squares in one pass, and what follows from it: norm, overflow, clip factor, loss scale.
#include "common.cuh"

namespace zp {

// Sum over [0, n) of this thread's squares. V * U fp32 accumulators a thread keep chains short and loads in flight.
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
        // Pairs in fp32, then fp64: few conversions, no loss that the accumulation did not already have.
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

// out[0] = (accumulate ? out[0] : 0) + sum of g². Deterministic for a given n, alignment and grid: every block leaves its
// part in partial[block], and the last to arrive adds them in order. ticket[0] is 0 before and after.
extern "C" __global__ void __launch_bounds__(ZP_THREADS)
    zp_sum_of_squares(const ZP_GRAD* g, long long n, long long head, double* partial, unsigned int* ticket, double* out, int accumulate) {
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
    if (threadIdx.x == 0) out[0] = accumulate ? out[0] + sum : sum;
}

// From the sum of squares of the scaled gradient (over all ranks) to this step's control block. One thread.
// max_norm <= 0: no clipping. window <= 0: the loss scale is static. The dynamic loss scale follows DeepSpeed's
// DynamicLossScaler (runtime/fp16/loss_scaler.py): the scale falls when an overflow finds no tolerance left, and rises after
// `window` good steps.
extern "C" __global__ void zp_finalize(const double* sum_of_squares, zp::Control* control, double max_norm, double divisor,
                                       int skip_on_overflow, long long window, double factor, double min_scale, double hysteresis,
                                       int refill_every_step) {
    const double sum = sum_of_squares[0];
    const bool overflow = !(sum <= 1.7976931348623157e308);
    const double unscale = 1.0 / (static_cast<double>(control->loss_scale) * divisor);
    const double norm = sqrt(sum) * unscale;
    double clip = 1.0;
    if (max_norm > 0.0) {
        clip = max_norm / (norm + 1e-6);
        if (clip > 1.0) clip = 1.0;
    }
    const bool skip = overflow && skip_on_overflow;
    control->grad_scale = static_cast<float>(clip * unscale);
    control->skip = skip ? 1.0f : 0.0f;
    control->found_inf = overflow ? 1.0f : 0.0f;
    control->norm = static_cast<float>(norm);
    if (skip) control->skipped_steps += 1.0f;
    if (window <= 0) return;
    if (overflow) {
        if (control->hysteresis <= 1.0f) {
            const double lower = control->loss_scale / factor;
            control->loss_scale = static_cast<float>(lower > min_scale ? lower : min_scale);
        } else {
            control->hysteresis -= 1.0f;
        }
        control->good_steps = 0.0f;
        return;
    }
    control->good_steps += 1.0f;
    if (refill_every_step) control->hysteresis = static_cast<float>(hysteresis);
    if (control->good_steps >= static_cast<float>(window)) {
        control->good_steps = 0.0f;
        control->hysteresis = static_cast<float>(hysteresis);
        control->loss_scale = static_cast<float>(control->loss_scale * factor);
    }
}
