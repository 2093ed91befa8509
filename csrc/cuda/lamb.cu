// LAMB (You et al. 2020, algorithm 2): Adam's direction, scaled for each tensor by ‖p‖ / ‖direction‖. As in DeepSpeed's
// FusedLamb the direction is made of uncorrected moments, and the step size carries the bias correction.
//
// Two passes over flat buffers that hold many tensors (segments). Between the passes the ranks that hold parts of one tensor
// add up their norms. The second pass computes the direction again from the moments, because storing it would move as many
// bytes and need memory.
#include "common.cuh"

namespace zp {

__device__ inline float direction(float p, float m, float v, float eps, float decay) { return m / (sqrtf(v) + eps) + decay * p; }

// Consecutive elements of one segment. The first of them is aligned, or it is the segment's first.
struct Tile {
    i64 begin, end, segment;
};

// Calls body.run<V>(i) for each vector and body.run<1>(i) for each single element of the tile. head is that of for_each.
template <int V, class Body>
__device__ inline void for_tile(const Tile& tile, i64 n, i64 head, Body& body) {
    i64 first = tile.end;
    if (head < n) {
        const i64 lead = ((head - tile.begin) % V + V) % V;
        if (tile.begin + lead < tile.end) first = tile.begin + lead;
    }
    const i64 packs = (tile.end - first) / V, tail = first + packs * V;
    for (i64 k = threadIdx.x; k < packs; k += blockDim.x) body.template run<V>(first + k * V);
    const i64 before = first - tile.begin, edge = before + (tile.end - tail);
    for (i64 k = threadIdx.x; k < edge; k += blockDim.x) body.template run<1>(k < before ? tile.begin + k : tail + (k - before));
}

struct Moments {
    const float* __restrict__ p;
    const ZP_GRAD* __restrict__ g;
    float* __restrict__ m;
    float* __restrict__ v;
    float scale, beta1, one_minus_beta1, beta2, one_minus_beta2, eps, decay;
    float weight, update; // this thread's sums of squares of p and of the direction

    template <int V>
    __device__ void run(i64 i) {
        float x[V], grad[V], first[V], second[V];
        read<V>(p + i, x);
        read<V>(g + i, grad);
        read<V>(m + i, first);
        read<V>(v + i, second);
#pragma unroll
        for (int k = 0; k < V; ++k) {
            const float scaled = grad[k] * scale;
            first[k] = beta1 * first[k] + one_minus_beta1 * scaled;
            second[k] = beta2 * second[k] + one_minus_beta2 * scaled * scaled;
            const float u = direction(x[k], first[k], second[k], eps, decay);
            weight = fmaf(x[k], x[k], weight);
            update = fmaf(u, u, update);
        }
        write<V>(m + i, first);
        write<V>(v + i, second);
    }
};

struct Apply {
    float* __restrict__ p;
    const float* __restrict__ m;
    const float* __restrict__ v;
    ZP_OUT* __restrict__ out;
    float eps, decay, rate;

    template <int V>
    __device__ void run(i64 i) {
        float x[V], first[V], second[V];
        read<V>(p + i, x);
        read<V>(m + i, first);
        read<V>(v + i, second);
#pragma unroll
        for (int k = 0; k < V; ++k) x[k] = x[k] - rate * direction(x[k], first[k], second[k], eps, decay);
        write<V>(p + i, x);
        write_at(out, i, x);
    }
};

} // namespace zp

// One block a tile. partial[tile] = {‖p‖², ‖direction‖²} of the tile.
extern "C" __global__ void __launch_bounds__(ZP_THREADS)
    zp_lamb_moments(const float* p, const ZP_GRAD* g, float* m, float* v, const zp::Tile* tiles, double2* partial, long long n,
                    long long head, const zp::Scalars* scalars, float beta1, float one_minus_beta1, float beta2, float one_minus_beta2,
                    float eps, float decay) {
    if (zp::skips(scalars)) return;
    zp::Moments body{p, g, m, v, zp::factor(scalars), beta1, one_minus_beta1, beta2, one_minus_beta2, eps, decay, 0.0f, 0.0f};
    zp::for_tile<ZP_VEC>(tiles[blockIdx.x], n, head, body);
    const double weight = zp::block_sum(body.weight), update = zp::block_sum(body.update);
    if (threadIdx.x == 0) partial[blockIdx.x] = make_double2(weight, update);
}

// One block a segment, whose tiles are [first_tile[s], first_tile[s + 1]). norms[s] = {‖p‖², ‖direction‖²}.
extern "C" __global__ void __launch_bounds__(ZP_THREADS)
    zp_lamb_norms(const double2* partial, const long long* first_tile, double2* norms) {
    double weight = 0.0, update = 0.0;
    for (long long t = first_tile[blockIdx.x] + threadIdx.x; t < first_tile[blockIdx.x + 1]; t += blockDim.x) {
        weight += partial[t].x;
        update += partial[t].y;
    }
    weight = zp::block_sum(weight);
    update = zp::block_sum(update);
    if (threadIdx.x == 0) norms[blockIdx.x] = make_double2(weight, update);
}

// One block a tile. p -= rate * trust * direction, trust = ‖p‖ / ‖direction‖ within [min_trust, max_trust], 1 where either is 0.
extern "C" __global__ void __launch_bounds__(ZP_THREADS)
    zp_lamb_apply(float* p, const float* m, const float* v, ZP_OUT* out, const zp::Tile* tiles, const double2* norms, long long n,
                  long long head, const zp::Scalars* scalars, float eps, float decay, double rate, double min_trust, double max_trust) {
    if (zp::skips(scalars)) return;
    const zp::Tile tile = tiles[blockIdx.x];
    __shared__ float step_size;
    if (threadIdx.x == 0) {
        const double2 norm = norms[tile.segment];
        double trust = 1.0;
        if (norm.x != 0.0 && norm.y != 0.0) {
            trust = sqrt(norm.x) / sqrt(norm.y);
            trust = trust > max_trust ? max_trust : (trust < min_trust ? min_trust : trust);
        }
        step_size = static_cast<float>(rate * trust);
    }
    __syncthreads();
    zp::Apply body{p, m, v, out, eps, decay, step_size};
    zp::for_tile<ZP_VEC>(tile, n, head, body);
}
