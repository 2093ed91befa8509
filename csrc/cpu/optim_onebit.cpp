// Momentum in one bit an element: the twins of csrc/cuda/onebit.cu, with the same bits. A scale's elements are one part of the
// work, kept in the cache while the routine passes over them.
#include "optim_onebit.hpp"

#include <cmath>
#include <cstring>

#include "abi.h"
#include "optim.hpp"
#include "pool.hpp"

namespace {

using std::size_t;

constexpr size_t lane_elements = 8, lanes = 1024, per_block = lane_elements * lanes;

// Adds up |c| over a block that zeros fill up, in the order of a GPU's thread block: eight elements a lane in sequence, then
// the halves of 32 lanes, then the halves of the 32 sums.
double sum_of_magnitudes(const float* c) {
    double sums[lanes];
    for (size_t lane = 0; lane < lanes; ++lane) {
        double sum = 0.0;
        for (size_t k = 0; k < lane_elements; ++k) sum += std::fabs(c[lane * lane_elements + k]);
        sums[lane] = sum;
    }
    double warps[32];
    for (size_t warp = 0; warp < 32; ++warp) {
        double* x = sums + 32 * warp;
        for (size_t half = 16; half > 0; half /= 2) {
            for (size_t k = 0; k < half; ++k) x[k] += x[k + half];
        }
        warps[warp] = x[0];
    }
    for (size_t half = 16; half > 0; half /= 2) {
        for (size_t k = 0; k < half; ++k) warps[k] += warps[k + half];
    }
    return warps[0];
}

// Where a block's signs and scale are in a message.
struct Place {
    unsigned char* signs;
    float* scale;
};

Place place(std::uint32_t* message, std::int64_t shard, size_t block) {
    auto* words = message + shard / 32;
    return {reinterpret_cast<unsigned char*>(message) + block * per_block / 8, reinterpret_cast<float*>(words) + block};
}

// Writes the signs and the scale of c's first `count` elements; zeros follow them. c becomes what they leave out.
void compress(float* c, size_t count, const Place& to) {
    const float scale = static_cast<float>(sum_of_magnitudes(c) / static_cast<double>(count));
    std::memcpy(to.scale, &scale, sizeof scale);
    for (size_t i = 0; i < count; i += 8) {
        unsigned signs = 0;
        for (size_t k = 0; k < 8; ++k) signs |= (c[i + k] >= 0.0f ? 1u : 0u) << k;
        to.signs[i / 8] = static_cast<unsigned char>(signs);
    }
    for (size_t i = 0; i < count; ++i) c[i] = c[i] - (c[i] >= 0.0f ? scale : -scale);
}

// Calls run(chunk, block, begin, count) for each block of each chunk; begin counts from the chunk's first element.
template <class Run>
void over_blocks(std::int64_t chunks, std::int64_t shard, int threads, Run run) {
    const size_t size = static_cast<size_t>(shard), blocks = (size + per_block - 1) / per_block;
    zeroplan::parallel(threads, blocks * static_cast<size_t>(chunks), [&](size_t part) {
        const size_t block = part % blocks, begin = block * per_block;
        run(part / blocks, block, begin, size - begin < per_block ? size - begin : per_block);
    });
}

} // namespace

ZEROPLAN_API void zeroplan_sign_pack(const ZeroplanSigns* a, int threads) {
    const zeroplan::Kernels& kernels = zeroplan::chosen_kernels();
    over_blocks(a->ranks, a->shard, threads, [&](size_t chunk, size_t block, size_t begin, size_t count) {
        const size_t first = chunk * static_cast<size_t>(a->shard) + begin;
        float c[per_block] = {};
        const size_t width = a->grad_type == ZEROPLAN_FP32 ? 4 : 2;
        const ZeroplanCast scaled{static_cast<const char*>(a->grad) + first * width, c, static_cast<std::int64_t>(count),
                                  a->grad_type, ZEROPLAN_FP32, a->factor};
        kernels.cast(scaled, 0, count);
        const float* momentum = a->momentum + first;
        float* error = a->error + first;
        for (size_t i = 0; i < count; ++i) c[i] = a->beta1 * momentum[i] + a->one_minus_beta1 * c[i] + error[i];
        compress(c, count, place(a->messages + chunk * static_cast<size_t>(a->words), a->shard, block));
        if (!a->skip) std::memcpy(error, c, count * sizeof(float));
    });
}

ZEROPLAN_API void zeroplan_sign_average(const ZeroplanSigns* a, std::uint32_t* message, float share, int threads) {
    over_blocks(1, a->shard, threads, [&](size_t, size_t block, size_t begin, size_t count) {
        float c[per_block] = {};
        for (std::int32_t rank = 0; rank < a->ranks; ++rank) {
            const Place from = place(a->messages + static_cast<size_t>(rank) * static_cast<size_t>(a->words), a->shard, block);
            const float scale = *from.scale;
            for (size_t i = 0; i < count; ++i) c[i] += from.signs[i / 8] >> (i % 8) & 1 ? scale : -scale;
        }
        float* error = a->error + begin;
        for (size_t i = 0; i < count; ++i) c[i] = c[i] * share + error[i];
        compress(c, count, place(message, a->shard, block));
        if (!a->skip) std::memcpy(error, c, count * sizeof(float));
    });
}

ZEROPLAN_API void zeroplan_sign_unpack(const ZeroplanSigns* a, float* values, int threads) {
    over_blocks(a->ranks, a->shard, threads, [&](size_t chunk, size_t block, size_t begin, size_t count) {
        const Place from = place(a->messages + chunk * static_cast<size_t>(a->words), a->shard, block);
        float* out = values + chunk * static_cast<size_t>(a->shard) + begin;
        const float scale = *from.scale, decay = a->beta1, gain = a->one_minus_beta1;
        for (size_t i = 0; i < count; ++i) {
            const float value = from.signs[i / 8] >> (i % 8) & 1 ? scale : -scale;
            out[i] = decay == 0.0f ? value : out[i] * decay + value * gain;
        }
    });
}

ZEROPLAN_API void zeroplan_frozen_adam(const ZeroplanStep* a, int threads) {
    const zeroplan::Kernels& kernels = zeroplan::chosen_kernels();
    over_blocks(1, a->n, threads, [&](size_t, size_t, size_t begin, size_t count) {
        float* p = a->param + begin;
        const float *m = a->first + begin, *v = a->second + begin;
        for (size_t i = 0; i < count; ++i) {
            const float direction = m[i] / (std::sqrt(v[i]) * a->root2 + a->eps);
            p[i] = a->keep * p[i] - a->rate * (v[i] == 0.0f ? 0.0f : direction);
        }
        if (a->out_type == ZEROPLAN_NONE) return;
        const ZeroplanCast narrowed{p, static_cast<char*>(a->out) + 2 * begin, static_cast<std::int64_t>(count), ZEROPLAN_FP32,
                                    a->out_type, 1.0f};
        kernels.cast(narrowed, 0, count);
    });
}
