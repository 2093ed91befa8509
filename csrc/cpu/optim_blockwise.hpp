// AdamW with its moments in blocks of codes, over Vec; optim_body.hpp includes it once for each instruction set.
//
// See Note [Blockwise states] and Note [Bins] in zeroplan_runtime/kernels/block_quantisation.py. A block is decoded to fp32 on
// the stack, stepped by vectors, and encoded again; what is rounded, and in which order, is as in csrc/cuda/adam_blockwise.cu.
#pragma once

namespace {

constexpr size_t most_block = 256, bins = 24 * 128 + 1;
constexpr std::int32_t first_bin = (127 - 24) << 7, last_bin = static_cast<std::int32_t>(bins) - 1;

inline std::uint32_t bits_of(float x) {
    std::uint32_t bits;
    std::memcpy(&bits, &x, 4);
    return bits;
}
inline float of_bits(std::uint32_t bits) {
    float x;
    std::memcpy(&x, &bits, 4);
    return x;
}

inline size_t width(std::int32_t type) { return type == ZEROPLAN_FP32 ? 4 : 2; }

// The tables of one moment.
struct Codes {
    const float* levels;
    const std::uint32_t* bins;
    std::uint32_t half; // of the codes: the ranks of negative numbers come after it. 0 where numbers are never negative.
    bool packed;        // two codes a byte
};

// The loops are apart, and their pointers restrict, so that all but the look-ups run in vectors.
inline void decode(const Codes& map, const std::uint8_t* __restrict__ codes, float scale, float* __restrict__ values, size_t block) {
    const float* __restrict__ levels = map.levels;
    if (map.packed) {
        for (size_t i = 0; i < block; i += 2) {
            values[i] = levels[codes[i / 2] & 15];
            values[i + 1] = levels[codes[i / 2] >> 4];
        }
    } else {
        for (size_t i = 0; i < block; ++i) values[i] = levels[codes[i]];
    }
    for (size_t i = 0; i < block; ++i) values[i] = values[i] * scale;
}

// Orders fp32 by magnitude, then negative above positive: the sign becomes the lowest bit. NaN is above all.
inline float largest_of(const float* __restrict__ values, size_t block) {
    std::uint32_t largest = 0;
    for (size_t i = 0; i < block; ++i) {
        const std::uint32_t bits = bits_of(values[i]), key = (bits << 1) | (bits >> 31);
        largest = key > largest ? key : largest;
    }
    return of_bits((largest >> 1) | (largest << 31));
}

// Writes the codes and returns the scale: the element of largest magnitude, 0 below 2^-120.
inline float encode(const Codes& map, const float* __restrict__ values, std::uint8_t* __restrict__ codes, size_t block) {
    float scale = largest_of(values, block);
    if (std::fabs(scale) < 0x1p-120f) scale = 0.0f;
    const float inverse = scale == 0.0f ? 0.0f : 1.0f / scale;
    alignas(64) std::uint32_t bits[most_block], bin[most_block];
    const std::uint32_t* __restrict__ table = map.bins;
    for (size_t i = 0; i < block; ++i) {
        bits[i] = bits_of(values[i] * inverse);
        const std::int32_t at = static_cast<std::int32_t>((bits[i] & 0x7fffffffu) >> 16) - first_bin;
        bin[i] = static_cast<std::uint32_t>(at < 0 ? 0 : (at < last_bin ? at : last_bin));
    }
    for (size_t i = 0; i < block; ++i) bin[i] = table[bin[i]];
    const std::uint32_t half = map.half, most = half ? half - 1 : 0;
    for (size_t i = 0; i < block; ++i) {
        const std::uint32_t rank = (bin[i] & 0xffu) + ((bits[i] & 0xffffu) >= (bin[i] >> 8) ? 1u : 0u);
        const std::uint32_t negative = half + (rank < most ? rank : most);
        const std::uint32_t use = half && rank ? bits[i] >> 31 : 0u; // 1 for a number below zero
        bin[i] = use ? negative : rank;
    }
    if (map.packed) {
        for (size_t i = 0; i < block; i += 2) codes[i / 2] = static_cast<std::uint8_t>(bin[i] | (bin[i + 1] << 4));
    } else {
        for (size_t i = 0; i < block; ++i) codes[i] = static_cast<std::uint8_t>(bin[i]);
    }
    return scale;
}

// The range is whole blocks.
void adam_blockwise(const ZeroplanBlockwise& a, size_t begin, size_t end) {
    const size_t block = static_cast<size_t>(a.block), levels = size_t{1} << a.bits;
    const std::uint32_t* tables = a.maps + 2 * levels;
    const bool packed = a.bits == 4;
    alignas(64) float values[2][256]; // the levels by code
    std::memcpy(values[0], a.maps, levels * 4);
    std::memcpy(values[1], a.maps + levels, levels * 4);
    const Codes maps[2] = {{values[0], tables, static_cast<std::uint32_t>(levels / 2), packed},
                           {values[1], tables + bins, 0, packed}};
    std::uint8_t* const codes[2] = {a.first, a.second};
    alignas(64) float moments[2][most_block];
    for (size_t at = begin; at < end; at += block) {
        float* scales = a.scales + 2 * (at / block);
        const size_t byte = packed ? at / 2 : at;
        for (size_t k = 0; k < 2; ++k) decode(maps[k], codes[k] + byte, scales[k], moments[k], block);
        ZeroplanStep step = a.step;
        step.param += at;
        step.grad = static_cast<const char*>(step.grad) + at * width(step.grad_type);
        if (step.out) step.out = static_cast<char*>(step.out) + at * width(step.out_type);
        step.first = moments[0];
        step.second = moments[1];
        step.n = static_cast<std::int64_t>(block);
        adam(step, 0, block);
        for (size_t k = 0; k < 2; ++k) scales[k] = encode(maps[k], moments[k], codes[k] + byte, block);
    }
}

} // namespace
