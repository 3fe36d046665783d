// Loading data of any kind, and the moments of sets of values.
//
// Sums over the data run in the statistics' type S within tiles that stay in cache, and in double across tiles. A tile's
// squares are taken around its own mean, so no digits are lost to data far from zero, whatever its first value is.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__GNUC__)
#define INLINE static inline __attribute__((always_inline))
#define INLINED __attribute__((always_inline))
#else
#define INLINE static inline
#define INLINED
#endif

// One version of a function for each level of the processor, chosen when the module is loaded.
#if defined(__x86_64__) && defined(__gnu_linux__) && defined(__GLIBC__) && defined(__GNUC__) && !defined(__clang__) && \
    !defined(MEMNORM_ONE_VERSION)
#define VERSIONS __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define VERSIONS
#endif

using std::int64_t;

struct bfloat16 {
    std::uint16_t bits;
};

INLINE float load(const float *p) { return *p; }
INLINE double load(const double *p) { return *p; }
INLINE float load(const bfloat16 *p) {
    std::uint32_t bits = std::uint32_t(p->bits) << 16;
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

INLINE void store(float *p, float value) { *p = value; }
INLINE void store(double *p, double value) { *p = value; }
INLINE void store(bfloat16 *p, float value) {  // to the nearest, ties to even; a NaN stays one
    std::uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    std::uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    p->bits = std::uint16_t(value == value ? rounded : 0x7fc0);
}

// Count, mean and summed squared deviation of a set of values.
struct Set {
    double count = 0, mean = 0, squares = 0;

    void join(double other_count, double other_mean, double other_squares) {
        if (count == 0) {
            count = other_count, mean = other_mean, squares = other_squares;
            return;
        }
        double total = count + other_count, shift = other_mean - mean;
        mean += shift * (other_count / total);
        squares += other_squares + shift * shift * (count * other_count / total);
        count = total;
    }
    void join(const Set &other) { join(other.count, other.mean, other.squares); }
};

constexpr int LANES = 32;  // independent partial sums: four registers of eight floats

template <class S> INLINE S total(const S *lanes) {
    S t[8];
    for (int j = 0; j < 8; j++) t[j] = (lanes[j] + lanes[j + 8]) + (lanes[j + 16] + lanes[j + 24]);
    return ((t[0] + t[4]) + (t[1] + t[5])) + ((t[2] + t[6]) + (t[3] + t[7]));
}

template <class T, class S> INLINE void add(const T *x, int64_t n, S *lanes) {
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES)
        for (int j = 0; j < LANES; j++) lanes[j] += load(x + i + j);
    for (int j = 0; i + j < n; j++) lanes[j] += load(x + i + j);
}

template <class T, class S> INLINE void add_deviations(const T *x, int64_t n, S centre, S *lanes, S *squares) {
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES)
        for (int j = 0; j < LANES; j++) {
            S d = load(x + i + j) - centre;
            lanes[j] += d;
            squares[j] += d * d;
        }
    for (int j = 0; i + j < n; j++) {
        S d = load(x + i + j) - centre;
        lanes[j] += d;
        squares[j] += d * d;
    }
}

// `gradient(i)` is the gradient that reaches x[i].
template <class T, class S, class Gradient>
INLINE void add_products(const T *x, int64_t n, S centre, Gradient gradient, S *lanes, S *products) {
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES)
        for (int j = 0; j < LANES; j++) {
            S g = gradient(i + j);
            lanes[j] += g;
            products[j] += g * (load(x + i + j) - centre);
        }
    for (int j = 0; i + j < n; j++) {
        S g = gradient(i + j);
        lanes[j] += g;
        products[j] += g * (load(x + i + j) - centre);
    }
}
