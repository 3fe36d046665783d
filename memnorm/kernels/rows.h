// The passes over data in rows: N·L rows of C values (channels_last, or no pixels at all). A slice is a range of rows.
//
// Few channels make short rows; then several are read as one wide row of several values per channel.
#pragma once

#include <vector>

#include "layer.h"

struct Rows {
    static constexpr int64_t WIDE = 64;     // values that a row should have at least
    static constexpr int64_t TILE = 32768;  // values that stay in a core's cache

    INLINE int64_t folds(int64_t channels) { return channels < WIDE ? WIDE / channels : 1; }

    // C values, `folds` times over.
    template <class S, class Entry> INLINE void repeat(std::vector<S> &wide, int64_t channels, Entry entry) {
        for (int64_t c = 0; c < channels; c++)
            for (int64_t j = c; j < int64_t(wide.size()); j += channels) wide[j] = entry(c);
    }

    template <class Job> INLINE void measure(const Job &job, int64_t begin, int64_t end, Set *sets) {
        using S = typename Job::S;
        int64_t folds = Rows::folds(job.c), width = folds * job.c, rows = (end - begin) / folds;
        int64_t step = TILE / width < 8 ? 8 : TILE / width;
        std::vector<S> scratch(3 * width);
        std::vector<double> merged(2 * width);
        S *centre = scratch.data(), *rest = centre + width, *squares = rest + width;
        double *mean = merged.data(), *spread = mean + width;
        const auto *data = job.x + begin * job.c;
        for (int64_t first = 0; first < rows; first += step) {
            int64_t last = first + step < rows ? first + step : rows;
            sum_columns(data, width, first, last, centre);
            for (int64_t j = 0; j < width; j++) centre[j] /= S(last - first), rest[j] = squares[j] = 0;
            deviate_columns(data, width, first, last, centre, rest, squares);
            double count = double(last - first), share = count / double(last), weight = double(first) * share;
#pragma omp simd
            for (int64_t j = 0; j < width; j++) {
                double missed = rest[j] / count, shift = centre[j] + missed - mean[j];
                mean[j] += shift * share;
                spread[j] += squares[j] - missed * missed * count + shift * shift * weight;
            }
        }
        for (int64_t c = 0; c < job.c; c++) sets[c] = Set();
        if (rows)
            for (int64_t j = 0; j < width; j += job.c)
                for (int64_t c = 0; c < job.c; c++) sets[c].join(double(rows), mean[j + c], spread[j + c]);
        for (int64_t r = rows * folds; r < end - begin; r++)
            for (int64_t c = 0; c < job.c; c++) sets[c].join(1, load(data + r * job.c + c), 0);
    }

    template <class T, class S>
    INLINE void sum_columns(const T *data, int64_t width, int64_t first, int64_t last, S *sums) {
        for (int64_t j = 0; j < width; j++) sums[j] = 0;
        int64_t r = first;
        for (; r + 4 <= last; r += 4) {
            const T *a = data + r * width, *b = a + width, *c = b + width, *d = c + width;
#pragma omp simd
            for (int64_t j = 0; j < width; j++) sums[j] += (load(a + j) + load(b + j)) + (load(c + j) + load(d + j));
        }
        for (; r < last; r++)
#pragma omp simd
            for (int64_t j = 0; j < width; j++) sums[j] += load(data + r * width + j);
    }

    template <class T, class S>
    INLINE void deviate_columns(
        const T *data, int64_t width, int64_t first, int64_t last, const S *centre, S *rest, S *squares) {
        int64_t r = first;
        for (; r + 2 <= last; r += 2) {
            const T *a = data + r * width, *b = a + width;
#pragma omp simd
            for (int64_t j = 0; j < width; j++) {
                S one = load(a + j) - centre[j], other = load(b + j) - centre[j];
                rest[j] += one + other;
                squares[j] += one * one + other * other;
            }
        }
        for (; r < last; r++)
#pragma omp simd
            for (int64_t j = 0; j < width; j++) {
                S one = load(data + r * width + j) - centre[j];
                rest[j] += one;
                squares[j] += one * one;
            }
    }

    template <class Job> INLINE void transform(const Job &job, int64_t begin, int64_t end) {
        using S = typename Job::S;
        int64_t width = folds(job.c) * job.c;
        std::vector<S> mean(width), scale(width), offset(width);
        repeat(mean, job.c, [&](int64_t c) INLINED { return job.hat_mean[c]; });
        repeat(scale, job.c, [&](int64_t c) INLINED { return job.scale(c); });
        repeat(offset, job.c, [&](int64_t c) INLINED { return job.offset(c); });
        const S *m = mean.data(), *s = scale.data(), *o = offset.data();
        job.finishing([&](auto finish) INLINED {
            for (int64_t at = begin * job.c; at < end * job.c; at += width) {
                int64_t length = at + width < end * job.c ? width : end * job.c - at;
                const auto *x = job.x + at;
#pragma omp simd
                for (int64_t j = 0; j < length; j++) finish(at + j, S((load(x + j) - m[j]) * s[j] + o[j]));
            }
        });
    }

    template <class Job> INLINE void add_up(const Job &job, int64_t begin, int64_t end, Sums *sums) {
        using S = typename Job::S;
        int64_t width = folds(job.c) * job.c;
        int64_t step = TILE / width < 8 ? 8 : TILE / width;
        std::vector<S> mean(width), scratch(2 * width);
        repeat(mean, job.c, [&](int64_t c) INLINED { return job.hat_mean[c]; });
        const S *m = mean.data();
        S *gradients = scratch.data(), *products = gradients + width;
        for (int64_t c = 0; c < job.c; c++) sums[c] = Sums();
        job.receiving(true, [&](auto gradient) INLINED {
            for (int64_t tile = begin * job.c; tile < end * job.c; tile += step * width) {
                int64_t stop = tile + step * width < end * job.c ? tile + step * width : end * job.c;
                for (int64_t j = 0; j < width; j++) gradients[j] = products[j] = 0;
                for (int64_t at = tile; at < stop; at += width) {
                    int64_t length = at + width < stop ? width : stop - at;
                    const auto *x = job.x + at;
#pragma omp simd
                    for (int64_t j = 0; j < length; j++) {
                        S g = gradient(at + j);
                        gradients[j] += g;
                        products[j] += g * (load(x + j) - m[j]);
                    }
                }
                for (int64_t j = 0; j < width; j += job.c)
                    for (int64_t c = 0; c < job.c; c++) {
                        sums[c].gradient += gradients[j + c];
                        sums[c].product += products[j + c];
                    }
            }
        });
    }

    template <class Job> INLINE void differentiate(const Job &job, int64_t begin, int64_t end) {
        using S = typename Job::S;
        int64_t width = folds(job.c) * job.c;
        std::vector<S> mean(width), scale(width), slope(width), offset(width);
        repeat(mean, job.c, [&](int64_t c) INLINED { return job.hat_mean[c]; });
        repeat(scale, job.c, [&](int64_t c) INLINED { return job.scale[c]; });
        repeat(slope, job.c, [&](int64_t c) INLINED { return job.slope[c]; });
        repeat(offset, job.c, [&](int64_t c) INLINED { return job.offset[c]; });
        const S *m = mean.data(), *s = scale.data(), *b = slope.data(), *o = offset.data();
        job.receiving(false, [&](auto gradient) INLINED {
            for (int64_t at = begin * job.c; at < end * job.c; at += width) {
                int64_t length = at + width < end * job.c ? width : end * job.c - at;
                const auto *x = job.x + at;
                auto *dx = job.dx + at;
#pragma omp simd
                for (int64_t j = 0; j < length; j++)
                    store(dx + j, S(s[j] * gradient(at + j) + (b[j] * (load(x + j) - m[j]) + o[j])));
            }
        });
    }
};
