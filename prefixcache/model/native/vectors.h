// Eight floats at a time, and the two number formats that weights and K/V come in.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace prefixcache {

typedef float Float8 __attribute__((vector_size(32)));
typedef uint32_t UInt8 __attribute__((vector_size(32)));

// The upper half of a float32; every value of it is a float32, so products are as exact as with float32 weights.
struct BFloat16 {
    uint16_t bits;
};

static inline Float8 load(const float* p) {
    Float8 v;
    memcpy(&v, p, sizeof v);
    return v;
}

static inline Float8 load(const BFloat16* p) {
#if defined(__AVX2__)  // what compilers make of the form below takes five instructions
    return (Float8)((UInt8)_mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))) << 16);
#else
    typedef uint16_t Half8 __attribute__((vector_size(16)));
    Half8 half;
    memcpy(&half, p, sizeof half);
    return (Float8)(__builtin_convertvector(half, UInt8) << 16);
#endif
}

static inline void store(float* p, Float8 v) { memcpy(p, &v, sizeof v); }

// Rounds to the nearest, ties to even, as PyTorch does; what is not a number stays one.
static inline void store(BFloat16* p, Float8 v) {
    typedef uint16_t Half8 __attribute__((vector_size(16)));
    UInt8 bits = (UInt8)v;
    UInt8 rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    UInt8 is_nan = (UInt8)(v != v);
    Half8 half = __builtin_convertvector((is_nan & 0x7fc0) | (~is_nan & rounded), Half8);
    memcpy(p, &half, sizeof half);
}

static inline float sum(Float8 v) {
    return ((v[0] + v[4]) + (v[2] + v[6])) + ((v[1] + v[5]) + (v[3] + v[7]));
}

// Where a or b is not a number: b.
static inline Float8 max(Float8 a, Float8 b) {
#if defined(__AVX2__)  // the same, in one instruction
    return (Float8)_mm256_max_ps((__m256)a, (__m256)b);
#else
    return a > b ? a : b;
#endif
}

// 2^x for x <= 0 or a little above, to about 1e-7; below -126.5, or not a number, it is 0. Polynomial: Taylor's, on
// [-0.5, 0.5].
static inline Float8 exp2(Float8 x) {
    const Float8 clamped = max(x, Float8{} - 127.0f);
    // Adding 1.5 * 2^23 rounds to the nearest integer, which then stands in the sum's low bits; the exponent's bias, 127,
    // is added along with it.
    const float shifter = 12582912.0f + 127.0f;
    const Float8 shifted = clamped + shifter;
    const Float8 f = clamped - (shifted - shifter);
    Float8 p = f * 1.5403530e-4f + 1.3333558e-3f;
    p = p * f + 9.6181291e-3f;
    p = p * f + 5.5504109e-2f;
    p = p * f + 2.4022651e-1f;
    p = p * f + 6.9314718e-1f;
    p = p * f + 1.0f;
    return p * (Float8)((UInt8)shifted << 23);
}

static inline Float8 silu(Float8 x) {
    const float log2e = 1.44269504f;
    Float8 a = x < 0.0f ? x : -x;  // -|x|
    Float8 e = exp2(a * log2e);
    Float8 sigmoid = (x < 0.0f ? e : (Float8){} + 1.0f) / (1.0f + e);
    return x * sigmoid;
}

// rows[i][j] becomes rows[j][i].
static inline void transpose(Float8 (&r)[8]) {
    Float8 a[8], b[8];
    for (int i = 0; i < 8; i += 2) {
        a[i] = __builtin_shufflevector(r[i], r[i + 1], 0, 8, 2, 10, 4, 12, 6, 14);
        a[i + 1] = __builtin_shufflevector(r[i], r[i + 1], 1, 9, 3, 11, 5, 13, 7, 15);
    }
    for (int i = 0; i < 8; i += 4)
        for (int j = 0; j < 2; j++) {
            b[i + j] = __builtin_shufflevector(a[i + j], a[i + j + 2], 0, 1, 8, 9, 4, 5, 12, 13);
            b[i + j + 2] = __builtin_shufflevector(a[i + j], a[i + j + 2], 2, 3, 10, 11, 6, 7, 14, 15);
        }
    for (int i = 0; i < 4; i++) {
        r[i] = __builtin_shufflevector(b[i], b[i + 4], 0, 1, 2, 3, 8, 9, 10, 11);
        r[i + 4] = __builtin_shufflevector(b[i], b[i + 4], 4, 5, 6, 7, 12, 13, 14, 15);
    }
}

// Puts each vector's eight numbers together with `combine`: the result's element i is of rows[i]. Changes rows.
template <class Combine>
static inline Float8 reduce(Float8 (&rows)[8], Combine&& combine) {
    transpose(rows);
    return combine(combine(combine(rows[0], rows[1]), combine(rows[2], rows[3])),
                   combine(combine(rows[4], rows[5]), combine(rows[6], rows[7])));
}

}  // namespace prefixcache
