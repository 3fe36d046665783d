// What one call works on, and the arithmetic per channel between the sums over the data and the pass that writes.
//
// The data are N × C × L values, in one of two layouts: planes, a channel's L values of an image side by side; or rows,
// N·L rows of C values. A layout gives four passes over a slice of the data (images of planes, rows of rows): `measure`
// and `transform` forward, `add_up` and `differentiate` backward.
#pragma once

#include "sets.h"

template <class Data, class Stat> struct Layer {
    using T = Data;  // of the data
    using S = Stat;  // of statistics and parameters: vectors of C

    int64_t n, c, l;
    const T *x;
    const S *weight, *bias;  // null where the layer has none
    S memory_weight;         // strength included

    double count() const { return double(n) * double(l); }
    double total() const { return count() + double(memory_weight); }
};

template <class Data, class Stat> struct Forward : Layer<Data, Stat> {
    using T = Data;
    using S = Stat;

    T *y;
    const T *residual;  // added before the ReLU; null if nothing is
    bool relu;       // y = max(·, 0)
    const S *memory_mean, *memory_var;
    double eps;
    S *saved_mean, *saved_var;   // the memory as it was read
    S *hat_mean, *hat_inv;       // μ̂ and 1/√(σ̂² + ε)
    S *batch_mean, *batch_var;

    // The union of each channel's batch and its memory.
    INLINED void settle(int64_t begin, int64_t end, const Set *batches) const {
        double share = this->count() / this->total(), other = 1 - share;
#pragma omp simd
        for (int64_t c = begin; c < end; c++) {
            const Set &batch = batches[c - begin];
            double mean = batch.mean, var = batch.squares / batch.count;
            double old_mean = memory_mean[c], old_var = memory_var[c], shift = mean - old_mean;
            double hat_var = old_var + share * (var - old_var) + share * other * shift * shift;
            saved_mean[c] = S(old_mean);
            saved_var[c] = S(old_var);
            hat_mean[c] = S(old_mean + share * shift);
            hat_inv[c] = S(1 / std::sqrt(hat_var + eps));
            batch_mean[c] = S(mean);
            batch_var[c] = S(var);
        }
    }
    S scale(int64_t c) const { return this->weight ? S(hat_inv[c] * this->weight[c]) : hat_inv[c]; }
    S offset(int64_t c) const { return this->bias ? this->bias[c] : S(0); }

    // Call pass(finish): finish(i, value) writes y[i] of a normalised value.
    template <class Pass> INLINED void finishing(Pass pass) const {
        T *out = y;
        const T *more = residual;
        if (!relu)
            pass([=](int64_t i, S value) INLINED { store(out + i, value); });
        else if (!more)
            pass([=](int64_t i, S value) INLINED { store(out + i, value < 0 ? S(0) : value); });
        else
            pass([=](int64_t i, S value) INLINED {
                S sum = value + load(more + i);
                store(out + i, sum < 0 ? S(0) : sum);
            });
    }
};

// Σ g and Σ g·(x − μ̂) of a channel.
struct Sums {
    double gradient = 0, product = 0;
};

// The gradient that reaches value i; it has passed a ReLU where the output y is not 0.
template <class T, class S> struct Plain {
    const T *g;

    Plain from(int64_t at) const { return {g + at}; }
    INLINED S operator()(int64_t i) const { return S(load(g + i)); }
};

template <class T, class S> struct AfterRelu {
    const T *g, *y;

    AfterRelu from(int64_t at) const { return {g + at, y + at}; }
    INLINED S operator()(int64_t i) const { return load(y + i) <= 0 ? S(0) : S(load(g + i)); }
};

template <class T, class S> struct AfterReluWritten : AfterRelu<T, S> {
    T *to;

    AfterReluWritten from(int64_t at) const { return {AfterRelu<T, S>::from(at), to + at}; }
    INLINED S operator()(int64_t i) const {
        S gradient = AfterRelu<T, S>::operator()(i);
        store(to + i, gradient);
        return gradient;
    }
};

template <class Data, class Stat> struct Backward : Layer<Data, Stat> {
    using T = Data;
    using S = Stat;

    const T *g;
    const T *y;      // the output, where a ReLU made it: no gradient comes through where it is 0; else null
    T *dx;           // null if nobody asks for it
    T *d_residual;   // likewise
    const S *hat_mean, *hat_inv;
    S *grad_weight, *grad_bias;
    S *scale, *slope, *offset;  // dx = scale·g + slope·(x − μ̂) + offset
    const S *past_mean = nullptr, *past_product = nullptr;  // A and Q of two-way memory; null where they count as 0

    // What is subtracted: ā = (Σg + w·A)/(n + w) and q̄ = (Σg·x̂ + w·Q)/(n + w), with w the memory's weight.
    INLINED void settle(int64_t begin, int64_t end, const Sums *all) const {
        double unit = -1 / this->total(), past = unit * double(this->memory_weight);
        bool remembers = past_mean != nullptr;
#pragma omp simd
        for (int64_t c = begin; c < end; c++) {
            const Sums &sums = all[c - begin];
            double inv = hat_inv[c], by = this->weight ? inv * this->weight[c] : inv;
            grad_bias[c] = S(sums.gradient);
            grad_weight[c] = S(inv * sums.product);
            double mean = unit * sums.gradient, product = unit * inv * sums.product;
            if (remembers) mean += past * past_mean[c], product += past * past_product[c];
            scale[c] = S(by);
            slope[c] = S(by * inv * product);
            offset[c] = S(by * mean);
        }
    }

    // Call pass(gradient): the one behind the ReLU, which is also the residual's and is written there if `writing`.
    template <class Pass> INLINED void receiving(bool writing, Pass pass) const {
        if (!y)
            pass(Plain<T, S>{g});
        else if (!d_residual)
            pass(AfterRelu<T, S>{g, y});
        else if (writing)
            pass(AfterReluWritten<T, S>{{g, y}, d_residual});
        else
            pass(Plain<T, S>{d_residual});
    }
};
