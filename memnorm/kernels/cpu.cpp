// The processor's kernels for Python: nothing of torch is needed to build or to load them.
//
// `train_layer` and `backward_layer` take tensors and answer None where these are unusual. The other functions take plain
// numbers; the addresses are those of tensors that memnorm/kernels/cpu.py has checked and keeps alive. The lock of the
// interpreter is released while data are read.
#include "quick.h"

namespace {

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
    write_to(job, in.bytes<S>());
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
    run_train(job, memory, *strength, recording, planes, threads);
    return true;
}

template <class T, class S> bool backward(Arguments in, bool planes, int64_t threads) {
    Backward<T, S> job;
    read_layer(job, in);
    job.g = in.address<T>();
    job.y = in.address<T>();
    job.dx = in.address<T>();
    job.d_residual = in.address<T>();
    const S *saved = in.bytes<S>();
    job.grad_weight = in.address<S>();
    job.grad_bias = in.address<S>();
    BackwardMemory<S> memory = read_backward_memory<S>(in);
    if (PyErr_Occurred()) return false;
    Unlocked unlocked;
    run_backward(job, saved, memory, planes, threads);
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

// Subtract its mean from each row.
template <class S> INLINE void center_rows(int64_t rows, int64_t length, S *row) {
    for (S *end = row + rows * length; row < end; row += length) {
        Pair<S> sums = ::add_up<S>(length, [=](int64_t i) INLINED { return Pair<S>{row[i], S(0)}; });
        S mean = S(double(sums.first) / double(length));
#pragma omp simd
        for (int64_t i = 0; i < length; i++) row[i] -= mean;
    }
}

VERSIONS void center(int64_t rows, int64_t length, float *data) { center_rows(rows, length, data); }
VERSIONS void center(int64_t rows, int64_t length, double *data) { center_rows(rows, length, data); }

PyObject *py_center(PyObject *, PyObject *const *args, Py_ssize_t given) {
    if (!arity(given, 4)) return nullptr;
    Arguments in{args};
    int64_t kind = in.integer(), rows = in.integer(), length = in.integer();
    void *data = in.address<void>();
    if (PyErr_Occurred()) return nullptr;
    if (kind == FLOAT64)
        center(rows, length, static_cast<double *>(data));
    else
        center(rows, length, static_cast<float *>(data));
    return nothing();
}

// Multiply the scalars at these addresses by as many factors.
template <class S> bool fade(PyObject *addresses, PyObject *factors) {
    for (Py_ssize_t i = 0; i < PyList_Size(addresses); i++) {
        auto *weight = static_cast<S *>(PyLong_AsVoidPtr(PyList_GetItem(addresses, i)));
        double factor = PyFloat_AsDouble(PyList_GetItem(factors, i));
        if (PyErr_Occurred()) return false;
        *weight = S(double(*weight) * factor);
    }
    return true;
}

PyObject *py_fade(PyObject *, PyObject *const *args, Py_ssize_t given) {
    if (!arity(given, 3)) return nullptr;
    if (!PyList_Check(args[1]) || !PyList_Check(args[2]) || PyList_Size(args[1]) != PyList_Size(args[2]))
        return PyErr_Format(PyExc_TypeError, "expected two lists of one length");
    bool done = PyLong_AsLongLong(args[0]) == FLOAT64 ? fade<double>(args[1], args[2]) : fade<float>(args[1], args[2]);
    return done ? nothing() : nullptr;
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
BY_KIND(backward, 20)

PyObject *py_record(PyObject *, PyObject *const *args, Py_ssize_t given) {
    if (!arity(given, 18)) return nullptr;
    Arguments in{args};
    int64_t kind = in.integer();
    return none_if([=] { return kind == FLOAT64 ? record<double>(in) : record<float>(in); });
}

PyObject *py_introduce(PyObject *, PyObject *const *args, Py_ssize_t given) {
    if (!arity(given, 14) || !introduce(args)) return nullptr;
    return nothing();
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
        "backward(kind, planes, threads, n, c, l, x, weight, g, y, dx, d_residual, saved, grad_weight, grad_bias, "
        "past_mean, past_product, past_weight, strength, recording)"},
    {"record", method(py_record), METH_FASTCALL,
        "record(kind, c, running_mean, running_var, running_weight, batches, means, vars, counts, slots, decay, "
        "prior_weight, prior_always, evenly, shift, mean, var, count)"},
    {"fade", method(py_fade), METH_FASTCALL, "fade(kind, addresses, factors)"},
    {"center", method(py_center), METH_FASTCALL, "center(kind, rows, length, data)"},
    {"introduce", method(py_introduce), METH_FASTCALL,
        "introduce(Tensor, Parameter, strided, float32, float64, bfloat16, empty_like, increment_version, observers, forward_ad, "
        "is_grad_enabled, is_fwd_grad_enabled, current_graph_task_id, top_saved_tensors_default_hooks): once, before the rest"},
    {"know", method(py_know), METH_FASTCALL, "know(buffers, parameters, wide, c, slots, written): what train_layer takes"},
    {"train_layer", method(py_train_layer), METH_FASTCALL,
        "train_layer(known, buffers, parameters, x, residual, rectify, ranks, threads, recording, eps, decay, prior_weight, "
        "prior_always, evenly): (y, saved), or None"},
    {"backward_layer", method(py_backward_layer), METH_FASTCALL,
        "backward_layer(saved, g, y, x, weight, wanted, threads, past, recording): gradients, or None"},
    {nullptr, nullptr, 0, nullptr}};

PyModuleDef module = {PyModuleDef_HEAD_INIT, "memnorm.kernels._cpu", "Kernels for the processor.", -1, methods,
    nullptr, nullptr, nullptr, nullptr};

}  // namespace

PyMODINIT_FUNC PyInit__cpu() { return PyModule_Create(&module); }
