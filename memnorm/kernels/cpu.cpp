// The processor's kernels for Python: pointers in, nothing of torch needed to build or to load.
//
// Every function takes plain numbers; the addresses are those of tensors that memnorm/kernels/cpu.py has checked and
// keeps alive. The lock of the interpreter is released while data are read.
#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030A0000
#include <Python.h>

#include <atomic>
#include <exception>
#include <new>

#include "planes.h"
#include "record.h"
#include "rows.h"

namespace {

constexpr int64_t TOGETHER = 16;  // channels that are settled at once, if they stay in cache meanwhile

template <class Job> inline int64_t together(const Job &job, int64_t first, int64_t end) {
    int64_t fit = 16384 / (job.n * job.l), some = fit < 1 ? 1 : fit < TOGETHER ? fit : TOGETHER;
    return first + some < end ? first + some : end;
}

// The functions of which there is a version for each level of the processor: all that touch data.
#define PASSES(T, S, Layout)                                                                                        \
    VERSIONS void measure(const Forward<T, S> &job, Layout, int64_t begin, int64_t end, Set *sets) {                \
        Layout::measure(job, begin, end, sets);                                                                     \
    }                                                                                                               \
    VERSIONS void transform(const Forward<T, S> &job, Layout, int64_t begin, int64_t end) {                         \
        Layout::transform(job, begin, end);                                                                         \
    }                                                                                                               \
    VERSIONS void add_up(const Backward<T, S> &job, Layout, int64_t begin, int64_t end, Sums *sums) {               \
        Layout::add_up(job, begin, end, sums);                                                                      \
    }                                                                                                               \
    VERSIONS void differentiate(const Backward<T, S> &job, Layout, int64_t begin, int64_t end) {                    \
        Layout::differentiate(job, begin, end);                                                                     \
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

// Call work(begin, end, part) for equal parts of [0, size), one per thread. An exception must not leave a thread.
template <class Work> void in_parts(int64_t size, int64_t threads, Work work) {
#ifdef _OPENMP
    if (threads > 1) {
        std::atomic<bool> failed{false};
#pragma omp parallel for num_threads(int(threads)) schedule(static, 1)
        for (int64_t part = 0; part < threads; part++) try {
                work(size * part / threads, size * (part + 1) / threads, part);
            } catch (const std::exception &) {
                failed = true;
            }
        if (failed) throw std::bad_alloc();
        return;
    }
#endif
    for (int64_t part = 0; part < threads; part++) work(size * part / threads, size * (part + 1) / threads, part);
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
        read(begin, end, results.data() + part * job.c);
    });
    for (int64_t part = 1; part < threads; part++)
        for (int64_t c = 0; c < job.c; c++) join(results[c], results[part * job.c + c]);
    settle(job, results.data());
    in_parts(size, threads, [&](int64_t begin, int64_t end, int64_t) { write(begin, end); });
}

template <class T, class S, class Layout>
void by_slice(const Forward<T, S> &job, Layout layout, int64_t size, int64_t threads) {
    by_slice<Set>(
        job, size, threads, [&](int64_t begin, int64_t end, Set *sets) { measure(job, layout, begin, end, sets); },
        [&](int64_t begin, int64_t end) { transform(job, layout, begin, end); });
}

template <class T, class S, class Layout>
void by_slice(const Backward<T, S> &job, Layout layout, int64_t size, int64_t threads) {
    by_slice<Sums>(
        job, size, threads, [&](int64_t begin, int64_t end, Sums *sums) { add_up(job, layout, begin, end, sums); },
        [&](int64_t begin, int64_t end) {
            if (job.dx) differentiate(job, layout, begin, end);
        });
}

// Whole channels to a thread where there are enough: its second reading of a channel then comes from its cache.
template <class Job> void run(const Job &job, bool planes, int64_t threads) {
    constexpr int64_t ALONE = 65536;  // values that one thread is done with before a second one has begun
    if (threads < 1 || job.n * job.c * job.l < ALONE) threads = 1;
    if (!planes)
        by_slice(job, Rows(), job.n * job.l, threads < job.n * job.l ? threads : job.n * job.l);
    else if (job.c >= 4 * threads || job.c % threads == 0 || job.n == 1)
        in_parts(job.c, threads < job.c ? threads : job.c,
            [&](int64_t begin, int64_t end, int64_t) { by_channel(job, begin, end); });
    else
        by_slice(job, Planes(), job.n, threads < job.n ? threads : job.n);
}

// Arguments, one after the other. A wrong type sets Python's error, which is looked at once, at the end.
struct Arguments {
    PyObject *const *next;

    int64_t integer() { return PyLong_AsLongLong(*next++); }
    double number() { return PyFloat_AsDouble(*next++); }
    template <class P> P *address() { return static_cast<P *>(PyLong_AsVoidPtr(*next++)); }
};

// Without the lock of the interpreter until the scope is left, be it by an exception.
struct Unlocked {
    PyThreadState *state = PyEval_SaveThread();

    Unlocked() = default;
    Unlocked(const Unlocked &) = delete;
    ~Unlocked() { PyEval_RestoreThread(state); }
};

template <class T, class S> void read_layer(Layer<T, S> &job, Arguments &in) {
    job.n = in.integer();
    job.c = in.integer();
    job.l = in.integer();
    job.x = in.address<T>();
    job.weight = in.address<S>();
}

template <class T, class S> void read_forward(Forward<T, S> &job, Arguments &in) {
    read_layer(job, in);
    job.bias = in.address<S>();
    job.residual = in.address<T>();
    job.rectify = in.integer() != 0;
    job.y = in.address<T>();
    job.eps = in.number();
    job.saved_mean = in.address<S>();
    job.saved_var = job.saved_mean + job.c;
    job.hat_mean = job.saved_var + job.c;
    job.hat_inv = job.hat_mean + job.c;
    job.batch_mean = job.hat_inv + job.c;
    job.batch_var = job.batch_mean + job.c;
}

// The memory's weight lies behind the saved vectors.
template <class T, class S> void run_forward(Forward<T, S> &job, double memory_weight, bool planes, int64_t threads) {
    job.memory_weight = job.batch_var[job.c] = S(memory_weight);
    run(job, planes, threads);
}

template <class T, class S> bool forward(Arguments in, bool planes, int64_t threads) {
    Forward<T, S> job;
    read_forward(job, in);
    job.memory_mean = in.address<S>();
    job.memory_var = in.address<S>();
    double memory_weight = in.number();
    if (PyErr_Occurred()) return false;
    Unlocked unlocked;
    run_forward(job, memory_weight, planes, threads);
    return true;
}

template <class S> void read_memory(Memory<S> &memory, Arguments &in) {
    memory.running_mean = in.address<S>();
    memory.running_var = in.address<S>();
    memory.running_weight = in.address<S>();
    memory.batches = in.address<int64_t>();
    memory.means = in.address<S>();
    memory.vars = in.address<S>();
    memory.counts = in.address<S>();
    memory.slots = in.integer();
    memory.decay = in.number();
    memory.prior_weight = in.number();
    memory.prior_always = in.integer() != 0;
    memory.evenly = in.integer() != 0;
    memory.shift = in.integer() != 0;
}

template <class T, class S> bool train(Arguments in, bool planes, int64_t threads) {
    Forward<T, S> job;
    Memory<S> memory;
    read_forward(job, in);
    const double *strength = in.address<double>();
    read_memory(memory, in);
    bool recording = in.integer() != 0;
    if (PyErr_Occurred()) return false;
    Unlocked unlocked;
    memory.c = job.c;
    job.memory_mean = memory.running_mean;
    job.memory_var = memory.running_var;
    run_forward(job, memory.evenly ? 0 : *strength * memory.weight(job.count()), planes, threads);
    if (recording) record(memory, job.batch_mean, job.batch_var, job.count());
    return true;
}

template <class T, class S> bool backward(Arguments in, bool planes, int64_t threads) {
    Backward<T, S> job;
    read_layer(job, in);
    job.g = in.address<T>();
    job.y = in.address<T>();
    job.dx = in.address<T>();
    job.d_residual = in.address<T>();
    const S *saved = in.address<S>();
    job.grad_weight = in.address<S>();
    job.grad_bias = in.address<S>();
    if (PyErr_Occurred()) return false;
    Unlocked unlocked;
    job.hat_mean = saved + 2 * job.c;
    job.hat_inv = saved + 3 * job.c;
    job.memory_weight = saved[6 * job.c];
    std::vector<S> line(std::size_t(3 * job.c));
    job.scale = line.data();
    job.slope = job.scale + job.c;
    job.offset = job.slope + job.c;
    run(job, planes, threads);
    return true;
}

template <class S> bool record(Arguments in) {
    Memory<S> memory;
    memory.c = in.integer();
    read_memory(memory, in);
    const S *mean = in.address<S>(), *var = in.address<S>();
    double count = in.number();
    if (PyErr_Occurred()) return false;
    record(memory, mean, var, count);
    return true;
}

enum Kind { FLOAT32, FLOAT64, BFLOAT16 };

bool arity(Py_ssize_t given, Py_ssize_t wanted) {
    if (given != wanted) PyErr_Format(PyExc_TypeError, "expected %zd arguments, got %zd", wanted, given);
    return given == wanted;
}

// None, or null with Python's error set.
template <class Call> PyObject *none_if(Call call) {
    try {
        if (!call()) return nullptr;
    } catch (const std::exception &) {  // only allocations throw
        return PyErr_NoMemory();
    }
    Py_INCREF(Py_None);
    return Py_None;
}

#define BY_KIND(function, wanted)                                                                                   \
    PyObject *py_##function(PyObject *, PyObject *const *args, Py_ssize_t given) {                                  \
        if (!arity(given, wanted)) return nullptr;                                                                  \
        Arguments in{args};                                                                                         \
        int64_t kind = in.integer(), planes = in.integer(), threads = in.integer();                                 \
        return none_if([=] {                                                                                        \
            if (kind == FLOAT32) return function<float, float>(in, planes, threads);                                \
            if (kind == FLOAT64) return function<double, double>(in, planes, threads);                              \
            return function<bfloat16, float>(in, planes, threads);                                                  \
        });                                                                                                         \
    }
BY_KIND(forward, 17)
BY_KIND(train, 29)
BY_KIND(backward, 15)

PyObject *py_record(PyObject *, PyObject *const *args, Py_ssize_t given) {
    if (!arity(given, 18)) return nullptr;
    Arguments in{args};
    int64_t kind = in.integer();
    return none_if([=] { return kind == FLOAT64 ? record<double>(in) : record<float>(in); });
}

PyCFunction method(PyObject *(*function)(PyObject *, PyObject *const *, Py_ssize_t)) {
    return reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(function));
}

PyMethodDef methods[] = {
    {"forward", method(py_forward), METH_FASTCALL,
        "forward(kind, planes, threads, n, c, l, x, weight, bias, residual, rectify, y, eps, saved, memory_mean, memory_var, memory_weight)"},
    {"train", method(py_train), METH_FASTCALL,
        "train(kind, planes, threads, n, c, l, x, weight, bias, residual, rectify, y, eps, saved, strength, running_mean, running_var, "
        "running_weight, batches, means, vars, counts, slots, decay, prior_weight, prior_always, evenly, shift, recording)"},
    {"backward", method(py_backward), METH_FASTCALL,
        "backward(kind, planes, threads, n, c, l, x, weight, g, y, dx, d_residual, saved, grad_weight, grad_bias)"},
    {"record", method(py_record), METH_FASTCALL,
        "record(kind, c, running_mean, running_var, running_weight, batches, means, vars, counts, slots, decay, "
        "prior_weight, prior_always, evenly, shift, mean, var, count)"},
    {nullptr, nullptr, 0, nullptr}};

PyModuleDef module = {PyModuleDef_HEAD_INIT, "memnorm.kernels._cpu", "Kernels for the processor.", -1, methods,
    nullptr, nullptr, nullptr, nullptr};

}  // namespace

PyMODINIT_FUNC PyInit__cpu() { return PyModule_Create(&module); }
