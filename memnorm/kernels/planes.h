// The passes over data in planes: contiguous N × C × L. A slice is a range of images.
#pragma once

#include "layer.h"

struct Planes {
    static constexpr int64_t TILE = 2048;  // values of a channel that stay in the nearest cache

    // Call tile(first, last, at, length) for tile after tile: `length` values from `at` on in planes of images [first, last).
    template <class Job, class Tile> INLINE void tiles(const Job &job, int64_t begin, int64_t end, Tile tile) {
        int64_t images = job.l < TILE ? TILE / job.l : 1, piece = job.l < TILE ? job.l : TILE;
        for (int64_t first = begin; first < end; first += images)
            for (int64_t at = 0; at < job.l; at += piece)
                tile(first, first + images < end ? first + images : end, at, at + piece < job.l ? piece : job.l - at);
    }

    template <class Job> INLINE Set measure(const Job &job, int64_t c, int64_t begin, int64_t end) {
        using S = typename Job::S;
        Set set;
        tiles(job, begin, end, [&](int64_t first, int64_t last, int64_t at, int64_t length) INLINED {
            double count = double(last - first) * double(length);
            auto plane = [=, &job](int64_t n) INLINED { return job.x + (n * job.c + c) * job.l + at; };
            Pair<S> sums = add_rows<S>(first, last, length, [=](int64_t n) INLINED {
                const auto *x = plane(n);
                return [=](int64_t i) INLINED { return Pair<S>{load(x + i), S(0)}; };
            });
            S centre = S(sums.first / count);
            Pair<S> rest = add_rows<S>(first, last, length, [=](int64_t n) INLINED {
                const auto *x = plane(n);
                return [=](int64_t i) INLINED {
                    S d = load(x + i) - centre;
                    return Pair<S>{d, d * d};
                };
            });
            double missed = rest.first / count;
            set.join(count, centre + missed, rest.second - missed * missed * count);
        });
        return set;
    }

    template <class Job> INLINE void transform(const Job &job, int64_t c, int64_t begin, int64_t end) {
        using S = typename Job::S;
        S mean = job.hat_mean[c], scale = job.scale(c), offset = job.offset(c);
        job.finishing([&](auto finish) INLINED {
            for (int64_t n = begin; n < end; n++) {
                int64_t at = (n * job.c + c) * job.l, length = job.l;
                const auto *x = job.x;
#pragma omp simd
                for (int64_t i = at; i < at + length; i++) finish(i, S((load(x + i) - mean) * scale + offset));
            }
        });
    }

    template <class Job> INLINE Sums add_up(const Job &job, int64_t c, int64_t begin, int64_t end) {
        using S = typename Job::S;
        Sums sums;
        S mean = job.hat_mean[c];
        job.receiving(true, [&](auto gradient) INLINED {
            tiles(job, begin, end, [&](int64_t first, int64_t last, int64_t at, int64_t length) INLINED {
                Pair<S> pair = add_rows<S>(first, last, length, [=, &job](int64_t n) INLINED {
                    int64_t start = (n * job.c + c) * job.l + at;
                    const auto *x = job.x + start;
                    auto here = gradient.from(start);
                    return [=](int64_t i) INLINED {
                        S g = here(i);
                        return Pair<S>{g, g * (load(x + i) - mean)};
                    };
                });
                sums.gradient += pair.first;
                sums.product += pair.second;
            });
        });
        return sums;
    }

    template <class Job> INLINE void differentiate(const Job &job, int64_t c, int64_t begin, int64_t end) {
        using S = typename Job::S;
        S mean = job.hat_mean[c], scale = job.scale[c], slope = job.slope[c], offset = job.offset[c];
        job.receiving(false, [&](auto gradient) INLINED {
            for (int64_t n = begin; n < end; n++) {
                int64_t at = (n * job.c + c) * job.l, length = job.l;
                const auto *x = job.x;
                auto *dx = job.dx;
#pragma omp simd
                for (int64_t i = at; i < at + length; i++)
                    store(dx + i, S(scale * gradient(i) + (slope * (load(x + i) - mean) + offset)));
            }
        });
    }

    template <class Job> INLINE void measure(const Job &job, int64_t begin, int64_t end, Set *sets) {
        for (int64_t c = 0; c < job.c; c++) sets[c] = measure(job, c, begin, end);
    }
    template <class Job> INLINE void transform(const Job &job, int64_t begin, int64_t end) {
        for (int64_t c = 0; c < job.c; c++) transform(job, c, begin, end);
    }
    template <class Job> INLINE void add_up(const Job &job, int64_t begin, int64_t end, Sums *sums) {
        for (int64_t c = 0; c < job.c; c++) sums[c] = add_up(job, c, begin, end);
    }
    template <class Job> INLINE void differentiate(const Job &job, int64_t begin, int64_t end) {
        for (int64_t c = 0; c < job.c; c++) differentiate(job, c, begin, end);
    }
};
