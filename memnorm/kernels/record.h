// The memory of a layer: how much it weighs, and making a batch the newest remembered one.
#pragma once

#include <vector>

#include "sets.h"

template <class S> struct Memory {
    int64_t slots, c;  // 0 slots: everything is remembered, in the pooled statistics alone
    S *running_mean, *running_var, *running_weight;
    int64_t *batches, *images;  // recorded; images since the last update, null without two-way memory
    S *means, *vars, *counts;  // of the slots, newest first
    double decay;
    double prior_weight;  // of statistics that stand in for an empty memory, in batches
    bool prior_always;    // even if they are the initial ones
    bool evenly;          // pool a batch with everything since the reset, whatever the slots hold

    // W; where nothing is recorded yet, the weight of the statistics that stand in.
    double weight(double count) const {
        if (*running_weight != 0) return double(*running_weight);
        bool trained = prior_always;
        for (int64_t i = 0; i < c && !trained; i++) trained = running_mean[i] != 0 || running_var[i] != 1;
        return trained ? double(S(prior_weight * count)) : 0;
    }
};

// Batches to be pooled: their moments and weights.
template <class S> struct Pool {
    std::vector<const S *> means, vars;
    std::vector<double> weights;
    double total = 0;

    explicit Pool(int64_t slots) {
        means.reserve(std::size_t(slots + 2)), vars.reserve(std::size_t(slots + 2));
        weights.reserve(std::size_t(slots + 2));
    }
    void add(const S *mean, const S *var, double weight) {
        if (weight == 0) return;
        means.push_back(mean), vars.push_back(var), weights.push_back(weight);
        total += weight;
    }
};

// What is known of united channels: whether their moments are finite, and whether these have lost digits.
struct United {
    int finite = 1, lossy = 0;
};

constexpr int64_t BLOCK = 128;  // channels that are united at once

// The moments of the union in `width` channels, summed in A around `centre`, a batch's means. The further the union's
// means are from these, the more digits are lost.
template <class A, class S>
INLINE United unite_block(const Pool<S> &pool, int64_t begin, int64_t width, const S *centre, S *mean, S *var) {
    A moved[BLOCK] = {}, spread[BLOCK] = {};
    for (std::size_t r = 0; r < pool.weights.size(); r++) {
        const S *row = pool.means[r] + begin, *own = pool.vars[r] + begin;
        A share = A(pool.weights[r] / pool.total);
#pragma omp simd
        for (int64_t j = 0; j < width; j++) {
            A d = A(row[j]) - A(centre[j]);
            moved[j] += share * d;
            spread[j] += share * (A(own[j]) + d * d);
        }
    }
    int finite = 1, lossy = 0;
#pragma omp simd reduction(& : finite) reduction(| : lossy)
    for (int64_t j = 0; j < width; j++) {
        A square = moved[j] * moved[j];
        S m = S(centre[j] + moved[j]), v = S(spread[j] - square);
        mean[j] = m;
        var[j] = v;
        finite &= (m - m) + (v - v) == 0;
        lossy |= square > 8 * v;
    }
    United united;
    united.finite = finite, united.lossy = lossy;
    return united;
}

// The moments of the union, and whether they are finite. The heaviest batch is next to the union, almost always.
template <class S> INLINE bool unite_rows(const Pool<S> &pool, int64_t c, S *mean, S *var) {
    std::size_t heaviest = 0;
    for (std::size_t r = 1; r < pool.weights.size(); r++)
        if (pool.weights[r] > pool.weights[heaviest]) heaviest = r;
    int finite = 1;
    for (int64_t begin = 0; begin < c; begin += BLOCK) {
        int64_t width = begin + BLOCK < c ? BLOCK : c - begin;
        const S *centre = pool.means[heaviest] + begin;
        United united = unite_block<S>(pool, begin, width, centre, mean + begin, var + begin);
        if (united.lossy) united = unite_block<double>(pool, begin, width, centre, mean + begin, var + begin);
        finite &= united.finite;
    }
    return finite;
}

VERSIONS static bool unite(const Pool<float> &pool, int64_t c, float *mean, float *var) {
    return unite_rows(pool, c, mean, var);
}
VERSIONS static bool unite(const Pool<double> &pool, int64_t c, double *mean, double *var) {
    return unite_rows(pool, c, mean, var);
}

// What two-way memory remembers of backward: the means of g and of g·x̂, and the weight they stand for.
template <class S> struct BackwardMemory {
    S *mean, *product, *weight;  // null without two-way memory
    const double *strength;      // null where the memory is not read

    S read_weight() const { return strength ? S(*strength * double(*weight)) : S(0); }
};

// Merge the means of a batch, given as sums over its `count` values. Sums that are not finite change nothing; then false.
template <class S>
bool record_backward(const BackwardMemory<S> &memory, int64_t c, const S *gradients, const S *products, double count) {
    double total = double(*memory.weight) + count, unit = 1 / total, kept = double(*memory.weight) * unit;
    std::vector<S> united(std::size_t(2 * c));
    S *mean = united.data(), *product = mean + c;
    int finite = 1;
#pragma omp simd reduction(& : finite)
    for (int64_t i = 0; i < c; i++) {
        S a = S(kept * memory.mean[i] + unit * gradients[i]), q = S(kept * memory.product[i] + unit * products[i]);
        mean[i] = a;
        product[i] = q;
        finite &= (a - a) + (q - q) == 0;
    }
    if (!finite) return false;
    std::memcpy(memory.mean, mean, std::size_t(c) * sizeof(S));
    std::memcpy(memory.product, product, std::size_t(c) * sizeof(S));
    *memory.weight = S(total);
    return true;
}

template <class S> inline void push(S *slots, int64_t count, int64_t c, const S *newest, const S *second) {
    std::memmove(slots + c, slots, std::size_t((count - 1) * c) * sizeof(S));
    std::memcpy(slots, newest, std::size_t(c) * sizeof(S));
    if (second && count > 1) std::memcpy(slots + c, second, std::size_t(c) * sizeof(S));
}

// Make (mean, var, count) the newest remembered batch, of so many images. One that is not finite changes nothing.
template <class S> void record(const Memory<S> &memory, const S *mean, const S *var, double count, int64_t images) {
    double weight = memory.weight(count);
    bool stood_in = weight > 0 && *memory.running_weight == 0;  // becomes the oldest entry
    Pool<S> pool(memory.slots);
    pool.add(mean, var, count);
    if (memory.evenly || memory.slots == 0) {
        pool.add(memory.running_mean, memory.running_var, weight * (memory.evenly ? 1 : memory.decay));
    } else {
        double fade = memory.decay;
        for (int64_t age = 1; age < memory.slots; age++, fade *= memory.decay) {
            int64_t row = (age - 1) * memory.c;
            if (age == 1 && stood_in)
                pool.add(memory.running_mean, memory.running_var, weight * fade);
            else
                pool.add(memory.means + row, memory.vars + row, double(memory.counts[age - 1]) * fade);
        }
    }
    std::vector<S> united(std::size_t(2 * memory.c));
    if (!unite(pool, memory.c, united.data(), united.data() + memory.c)) return;
    if (memory.slots) {
        S batch = S(count), prior = S(weight);
        push(memory.means, memory.slots, memory.c, mean, stood_in ? memory.running_mean : nullptr);
        push(memory.vars, memory.slots, memory.c, var, stood_in ? memory.running_var : nullptr);
        push<S>(memory.counts, memory.slots, 1, &batch, stood_in ? &prior : nullptr);
    }
    std::memcpy(memory.running_mean, united.data(), std::size_t(memory.c) * sizeof(S));
    std::memcpy(memory.running_var, united.data() + memory.c, std::size_t(memory.c) * sizeof(S));
    *memory.running_weight = S(pool.total);
    ++*memory.batches;
    if (memory.images) *memory.images += images;
}
