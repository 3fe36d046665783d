// How the passes of a job are spread over channels and threads, with a version of each for every level of the CPU.
#pragma once

#include <atomic>
#include <exception>
#include <new>
#include <vector>

#include "planes.h"
#include "rows.h"

namespace {

constexpr int64_t ALONE = 16384;  // values that one thread is done with before a second one has begun
constexpr int64_t TOGETHER = 16;  // channels that are settled at once, if they stay in cache meanwhile

template <class Job> inline int64_t together(const Job &job, int64_t first, int64_t end) {
    int64_t fit = 16384 / (job.n * job.l), some = fit < 1 ? 1 : fit < TOGETHER ? fit : TOGETHER;
    return first + some < end ? first + some : end;
}

// Run `work`; return false if memory is out. GCC takes a function with versions for one that throws nothing, and leaves out what
// would catch it: an exception must not get that far.
template <class Work> INLINE bool done(Work work) {
    try {
        work();
        return true;
    } catch (const std::exception &) {
        return false;
    }
}

// The functions of which there is a version for each level of the CPU: all that touch data.
#define PASSES(T, S, Layout)                                                                                        \
    VERSIONS bool measure(const Forward<T, S> &job, Layout, int64_t begin, int64_t end, Set *sets) {                \
        return done([&]() INLINED { Layout::measure(job, begin, end, sets); });                                     \
    }                                                                                                               \
    VERSIONS bool transform(const Forward<T, S> &job, Layout, int64_t begin, int64_t end) {                         \
        return done([&]() INLINED { Layout::transform(job, begin, end); });                                         \
    }                                                                                                               \
    VERSIONS bool add_up(const Backward<T, S> &job, Layout, int64_t begin, int64_t end, Sums *sums) {               \
        return done([&]() INLINED { Layout::add_up(job, begin, end, sums); });                                      \
    }                                                                                                               \
    VERSIONS bool differentiate(const Backward<T, S> &job, Layout, int64_t begin, int64_t end) {                    \
        return done([&]() INLINED { Layout::differentiate(job, begin, end); });                                     \
    }
#define CHANNELS(T, S)                                                                                              \
    VERSIONS void by_channel(const Forward<T, S> &job, int64_t begin, int64_t end) {                                \
        Set sets[TOGETHER];                                                                                         \
        for (int64_t first = begin, last; first < end; first = last) {                                              \
            last = together(job, first, end);                                                                       \
            for (int64_t c = first; c < last; c++) sets[c - first] = Planes::measure(job, c, 0, job.n);             \
            job.settle(first, last, sets);                                                                          \
            for (int64_t c = first; c < last; c++) Planes::transform(job, c, 0, job.n);                             \
        }                                                                                                           \
    }                                                                                                               \
    VERSIONS void by_channel(const Backward<T, S> &job, int64_t begin, int64_t end) {                               \
        Sums sums[TOGETHER];                                                                                        \
        for (int64_t first = begin, last; first < end; first = last) {                                              \
            last = together(job, first, end);                                                                       \
            for (int64_t c = first; c < last; c++) sums[c - first] = Planes::add_up(job, c, 0, job.n);              \
            job.settle(first, last, sums);                                                                          \
            for (int64_t c = first; c < last && job.dx; c++) Planes::differentiate(job, c, 0, job.n);               \
        }                                                                                                           \
    }
#define SETTLE(T, S)                                                                                                \
    VERSIONS void settle(const Forward<T, S> &job, const Set *sets) { job.settle(0, job.c, sets); }                 \
    VERSIONS void settle(const Backward<T, S> &job, const Sums *sums) { job.settle(0, job.c, sums); }
#define TYPES(T, S) PASSES(T, S, Planes) PASSES(T, S, Rows) CHANNELS(T, S) SETTLE(T, S)
TYPES(float, float)
TYPES(double, double)
TYPES(bfloat16, float)

// Call work(begin, end, part) for equal parts of [0, size), one per thread; it says whether it was done.
template <class Work> void in_parts(int64_t size, int64_t threads, Work work) {
    std::atomic<bool> failed{false};
    auto one = [&](int64_t part) {
        if (!work(size * part / threads, size * (part + 1) / threads, part)) failed = true;
    };
    if (threads > 1) {
#ifdef _OPENMP
#pragma omp parallel for num_threads(int(threads)) schedule(static, 1)
#endif
        for (int64_t part = 0; part < threads; part++) one(part);
    } else {
        one(0);
    }
    if (failed) throw std::bad_alloc();
}

void join(Set &all, const Set &part) { all.join(part); }
void join(Sums &all, const Sums &part) {
    all.gradient += part.gradient;
    all.product += part.product;
}

// Sums per slice, their union per channel, and the pass that writes.
template <class Result, class Job, class Read, class Write>
void by_slice(const Job &job, int64_t size, int64_t threads, Read read, Write write) {
    std::vector<Result> results(std::size_t(threads * job.c));
    in_parts(size, threads, [&](int64_t begin, int64_t end, int64_t part) {
        return read(begin, end, results.data() + part * job.c);
    });
    for (int64_t part = 1; part < threads; part++)
        for (int64_t c = 0; c < job.c; c++) join(results[c], results[part * job.c + c]);
    settle(job, results.data());
    in_parts(size, threads, [&](int64_t begin, int64_t end, int64_t) { return write(begin, end); });
}

template <class T, class S, class Layout>
void by_slice(const Forward<T, S> &job, Layout layout, int64_t size, int64_t threads) {
    by_slice<Set>(
        job, size, threads, [&](int64_t begin, int64_t end, Set *sets) { return measure(job, layout, begin, end, sets); },
        [&](int64_t begin, int64_t end) { return transform(job, layout, begin, end); });
}

template <class T, class S, class Layout>
void by_slice(const Backward<T, S> &job, Layout layout, int64_t size, int64_t threads) {
    by_slice<Sums>(
        job, size, threads, [&](int64_t begin, int64_t end, Sums *sums) { return add_up(job, layout, begin, end, sums); },
        [&](int64_t begin, int64_t end) { return !job.dx || differentiate(job, layout, begin, end); });
}

// Whole channels to a thread where there are enough: its second reading of a channel then comes from its cache.
template <class Job> void run(const Job &job, bool planes, int64_t threads) {
    // More for few rows of many channels, whose sums have to be joined.
    int64_t alone = planes || job.n * job.l >= 4 * job.c ? ALONE : 4 * ALONE;
    if (threads < 1 || job.n * job.c * job.l < alone) threads = 1;
    if (!planes)
        by_slice(job, Rows(), job.n * job.l, threads < job.n * job.l ? threads : job.n * job.l);
    else if (job.c >= 4 * threads || job.c % threads == 0 || job.n == 1)
        in_parts(job.c, threads < job.c ? threads : job.c,
            [&](int64_t begin, int64_t end, int64_t) {
                by_channel(job, begin, end);
                return true;
            });
    else
        by_slice(job, Planes(), job.n, threads < job.n ? threads : job.n);
}

}  // namespace
