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

// One version of a function for each level of the CPU, chosen when the module is loaded.
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

constexpr int LANES = 32;     // independent partial sums: four registers of eight floats
constexpr int64_t SHORT = 512;  // values that are summed without them

// Sums of two quantities.
template <class S> struct Pair {
    S first = 0, second = 0;

    void operator+=(const Pair &other) { first += other.first, second += other.second; }
};

// Σ first(i) and Σ second(i) over [0, n), where both come from entry(i).
template <class S, class Entry> INLINE Pair<S> add_short(int64_t n, Entry entry) {
    S first = 0, second = 0;
#pragma omp simd reduction(+ : first, second)
    for (int64_t i = 0; i < n; i++) {
        Pair<S> one = entry(i);
        first += one.first;
        second += one.second;
    }
    Pair<S> sums;
    sums.first = first, sums.second = second;
    return sums;
}

template <class S, class Entry> INLINE Pair<S> add_long(int64_t n, Entry entry) {
    S first[LANES] = {}, second[LANES] = {};
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES)
        for (int j = 0; j < LANES; j++) {
            Pair<S> one = entry(i + j);
            first[j] += one.first;
            second[j] += one.second;
        }
    Pair<S> sums = add_short<S>(n - i, [&](int64_t j) INLINED { return entry(i + j); });
    sums += add_short<S>(LANES, [&](int64_t j) INLINED { return Pair<S>{first[j], second[j]}; });
    return sums;
}

template <class S, class Entry> INLINE Pair<S> add_up(int64_t n, Entry entry) {
    return n < SHORT ? add_short<S>(n, entry) : add_long<S>(n, entry);
}

// The same over `length` values in each of the rows [first, last), whose entries at(row) gives. In short rows the partial
// sums continue from row to row.
template <class S, class At> INLINE Pair<S> add_rows(int64_t first, int64_t last, int64_t length, At at) {
    Pair<S> sums;
    if (length < LANES || length >= SHORT || 4 * (length % LANES) > length) {
        for (int64_t row = first; row < last; row++) sums += add_up<S>(length, at(row));
        return sums;
    }
    S one[LANES] = {}, other[LANES] = {};
    for (int64_t row = first; row < last; row++) {
        auto entry = at(row);
        int64_t i = 0;
        for (; i + LANES <= length; i += LANES)
            for (int j = 0; j < LANES; j++) {
                Pair<S> pair = entry(i + j);
                one[j] += pair.first;
                other[j] += pair.second;
            }
        if (i < length) sums += add_short<S>(length - i, [&](int64_t j) INLINED { return entry(i + j); });
    }
    sums += add_short<S>(LANES, [&](int64_t j) INLINED { return Pair<S>{one[j], other[j]}; });
    return sums;
}
