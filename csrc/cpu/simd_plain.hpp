// One lane: any processor. The compiler may vectorize what it can.
#pragma once

#include <cstdint>
#include <cstring>

namespace {

struct Vec {
    static constexpr int width = 1;
    float x;
};

inline float as_float(std::uint32_t bits) {
    float x;
    std::memcpy(&x, &bits, 4);
    return x;
}
inline std::uint32_t as_bits(float x) {
    std::uint32_t bits;
    std::memcpy(&bits, &x, 4);
    return bits;
}

inline Vec splat(float x) { return {x}; }
inline Vec operator+(Vec a, Vec b) { return {a.x + b.x}; }
inline Vec operator-(Vec a, Vec b) { return {a.x - b.x}; }
inline Vec operator*(Vec a, Vec b) { return {a.x * b.x}; }
inline Vec operator/(Vec a, Vec b) { return {a.x / b.x}; }
inline Vec root(Vec a) { return {__builtin_sqrtf(a.x)}; }
inline Vec sign(Vec a) { return {a.x > 0.0f ? 1.0f : (a.x < 0.0f ? -1.0f : a.x - a.x)}; }

inline Vec load(const float* p) { return {*p}; }
inline Vec load(const Bf16* p) { return {as_float(static_cast<std::uint32_t>(p->bits) << 16)}; }
inline Vec load(const Fp16* p) {
    const std::uint32_t h = p->bits, sign_bit = (h & 0x8000u) << 16, rest = h & 0x7fffu;
    if (rest >= 0x7c00u) return {as_float(sign_bit | 0x7f800000u | ((rest & 0x3ffu) << 13))}; // infinity, NaN
    // As if the exponent were fp32's, then times 2^112, which also normalizes subnormals exactly.
    return {as_float(sign_bit | as_bits(as_float(rest << 13) * 0x1p112f))};
}

inline void store(float* p, Vec a) { *p = a.x; }
inline void store(Bf16* p, Vec a) {
    const std::uint32_t bits = as_bits(a.x);
    p->bits = a.x != a.x ? 0x7fc0 : static_cast<std::uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}
inline void store(Fp16* p, Vec a) {
    const std::uint32_t bits = as_bits(a.x), sign_bit = (bits >> 16) & 0x8000u, rest = bits & 0x7fffffffu;
    std::uint32_t h;
    if (rest > 0x7f800000u) {
        h = 0x7e00u;
    } else if (rest >= 0x477ff000u) { // at least 65520 rounds to infinity
        h = 0x7c00u;
    } else if (rest < 0x38800000u) { // subnormal: adding 0.5 leaves the rounded bits at the mantissa's end
        h = as_bits(as_float(rest) + 0.5f) - as_bits(0.5f);
    } else {
        h = (rest - 0x38000000u + 0xfffu + ((rest >> 13) & 1u)) >> 13;
    }
    p->bits = static_cast<std::uint16_t>(sign_bit | h);
}

template <class T>
inline void stream(T* p, Vec a) {
    store(p, a);
}
inline void fence() {}

} // namespace
