// A layer's forward and backward from its tensors, in the usual case; None in every other.
#pragma once

#include "calls.h"

namespace {

// A layer's memory and parameters as they were found fit for the kernels.
struct Known {
    static constexpr int BUFFERS = 8, ALL = 10;
    PyObject *tensors[ALL], *written;  // those that a record changes, as a tuple
    void *addresses[ALL];
    int64_t wide, c, slots;

    static PyObject *name(int i) {
        static const char *words[ALL] = {"strength", "running_mean", "running_var", "running_weight", "num_batches_tracked",
            "memory_mean", "memory_var", "memory_count", "weight", "bias"};
        static PyObject *names[ALL];
        return names[i] ? names[i] : names[i] = PyUnicode_InternFromString(words[i]);
    }
    static PyObject *find(PyObject *buffers, PyObject *parameters, int i) {  // borrowed, or null
        return PyDict_GetItem(i < BUFFERS ? buffers : parameters, name(i));
    }
    // Whether each still is where it was.
    bool holds(PyObject *buffers, PyObject *parameters) const {
        for (int i = 0; i < ALL; i++) {
            PyObject *tensor = find(buffers, parameters, i);
            if (tensor != tensors[i] || address(tensor) != addresses[i]) return false;
            if (i >= BUFFERS && tensor != Py_None && !has_values(tensor, c)) return false;
        }
        return true;
    }
    template <class S> Memory<S> memory() const {
        Memory<S> found;
        auto at = [&](int i) { return static_cast<S *>(addresses[i]); };
        found.running_mean = at(1), found.running_var = at(2), found.running_weight = at(3);
        found.batches = static_cast<int64_t *>(addresses[4]);
        found.means = at(5), found.vars = at(6), found.counts = at(7);
        found.slots = slots;
        return found;
    }
};

void forget(PyObject *capsule) {
    auto *known = static_cast<Known *>(PyCapsule_GetPointer(capsule, nullptr));
    for (PyObject *tensor : known->tensors) Py_XDECREF(tensor);
    Py_XDECREF(known->written);
    delete known;
}

PyObject *py_know(PyObject *, PyObject *const *args, Py_ssize_t given) {
    if (!introduced() || !arity(given, 6)) return nullptr;
    if (!PyDict_Check(args[0]) || !PyDict_Check(args[1])) return PyErr_Format(PyExc_TypeError, "expected dictionaries");
    auto *known = new Known();
    Ref capsule(PyCapsule_New(known, nullptr, forget));
    known->wide = PyObject_IsTrue(args[2]);
    known->c = PyLong_AsLongLong(args[3]);
    known->slots = PyLong_AsLongLong(args[4]);
    Py_INCREF(known->written = args[5]);
    for (int i = 0; i < Known::ALL && !PyErr_Occurred(); i++) {
        PyObject *tensor = Known::find(args[0], args[1], i);
        if (!tensor) return PyErr_Format(PyExc_KeyError, "%U", Known::name(i));
        Py_INCREF(known->tensors[i] = tensor);
        known->addresses[i] = address(tensor);
    }
    return PyErr_Occurred() ? nullptr : capsule.release();
}

bool among(PyObject *ranks, Py_ssize_t rank) {
    for (Py_ssize_t i = 0; i < PyTuple_Size(ranks); i++)
        if (PyLong_AsSsize_t(PyTuple_GetItem(ranks, i)) == rank) return true;
    return false;
}

// The kind of data whose statistics are `wide` or not; -1 if the tensor is of another.
int64_t kind_of(PyObject *tensor, bool wide) {
    for (int64_t kind = 0; kind < 3; kind++)
        if (has_dtype(tensor, kind)) return (kind == FLOAT64) == wide ? kind : -1;
    return -1;
}

// Whether `other` can be read beside a tensor of this kind and layout.
bool goes_along(PyObject *other, int64_t kind, const Layout &layout) {
    return is_plain(other) && has_dtype(other, kind) && layout.has_shape_of(other) && layout.matches(other);
}

template <class T, class S> bool train_layer(const Known &known, const Layout &layout, PyObject *const *args, PyObject *y, PyObject *saved) {
    Forward<T, S> job;
    Memory<S> memory = known.memory<S>();
    job.n = layout.n, job.c = layout.c, job.l = layout.l;
    job.x = static_cast<const T *>(address(args[3]));
    job.weight = static_cast<const S *>(known.addresses[8]);
    job.bias = static_cast<const S *>(known.addresses[9]);
    job.residual = static_cast<const T *>(address(args[4]));
    job.rectify = args[5] == Py_True;
    job.y = static_cast<T *>(address(y));
    write_to(job, reinterpret_cast<S *>(PyByteArray_AsString(saved)));
    Arguments in{args + 7};
    int64_t threads = in.integer();
    bool recording = in.integer() != 0;
    job.eps = in.number();
    memory.decay = in.number();
    memory.prior_weight = in.number();
    memory.prior_always = in.integer() != 0;
    memory.evenly = in.integer() != 0;
    memory.shift = true;
    if (PyErr_Occurred()) return false;
    double strength = *static_cast<const double *>(known.addresses[0]);
    Unlocked unlocked;
    run_train(job, memory, strength, recording, layout.planes, threads);
    return true;
}

PyObject *nothing() {
    Py_INCREF(Py_None);
    return Py_None;
}

// (y, saved), or None if something is unusual.
PyObject *py_train_layer(PyObject *, PyObject *const *args, Py_ssize_t given) {
    if (!arity(given, 14)) return nullptr;
    auto *known = static_cast<Known *>(PyCapsule_GetPointer(args[0], nullptr));
    PyObject *x = args[3], *residual = args[4], *ranks = args[6], *recording = args[8];
    if (!known || !PyDict_Check(args[1]) || !PyDict_Check(args[2]) || !PyTuple_Check(ranks)) return nullptr;
    if (!unobserved() || !once() || !is_plain(x)) return PyErr_Occurred() ? nullptr : nothing();
    Layout layout(x);
    int64_t kind = kind_of(x, known->wide);
    bool usual = layout.known && kind >= 0 && layout.c == known->c && layout.c > 0 && layout.n * layout.l > 1 &&
        among(ranks, PyTuple_Size(layout.shape.object)) && known->holds(args[1], args[2]) &&
        (residual == Py_None || (args[5] == Py_True && goes_along(residual, kind, layout)));
    if (!usual) return PyErr_Occurred() ? nullptr : nothing();
    Ref y(PyObject_CallFunctionObjArgs(torch.empty_like, x, nullptr));
    Ref saved(PyByteArray_FromStringAndSize(nullptr, (6 * layout.c + 1) * (known->wide ? 8 : 4)));
    if (!y || !saved) return nullptr;
    Ref done(none_if([&] {
        if (kind == FLOAT32) return train_layer<float, float>(*known, layout, args, y.object, saved.object);
        if (kind == FLOAT64) return train_layer<double, double>(*known, layout, args, y.object, saved.object);
        return train_layer<bfloat16, float>(*known, layout, args, y.object, saved.object);
    }));
    if (!done) return nullptr;
    if (recording == Py_True && !Ref(PyObject_CallFunctionObjArgs(torch.increment_version, known->written, nullptr)))
        return nullptr;
    return PyTuple_Pack(2, y.object, saved.object);
}

// A tensor for the gradient of an argument; None if it is not wanted.
Ref like(PyObject *tensor, PyObject *wanted, Py_ssize_t argument) {
    if (PyTuple_GetItem(wanted, argument) != Py_True) return Ref(nothing());
    return Ref(PyObject_CallFunctionObjArgs(torch.empty_like, tensor, nullptr));
}

template <class T, class S>
bool backward_layer(const Layout &layout, PyObject *const *args, PyObject *const *results, int64_t threads) {
    Backward<T, S> job;
    job.n = layout.n, job.c = layout.c, job.l = layout.l;
    job.g = static_cast<const T *>(address(args[1]));
    job.y = static_cast<const T *>(address(args[2]));
    job.x = static_cast<const T *>(address(args[3]));
    job.weight = static_cast<const S *>(address(args[4]));
    job.dx = static_cast<T *>(address(results[0]));
    job.d_residual = static_cast<T *>(address(results[3]));
    job.grad_weight = static_cast<S *>(address(results[1]));
    job.grad_bias = static_cast<S *>(address(results[2]));
    std::vector<S> unwanted(std::size_t(job.grad_weight && job.grad_bias ? 0 : job.c));
    if (!job.grad_weight) job.grad_weight = unwanted.data();
    if (!job.grad_bias) job.grad_bias = unwanted.data();
    const S *saved = reinterpret_cast<const S *>(PyByteArray_AsString(args[0]));
    if (PyErr_Occurred()) return false;
    Unlocked unlocked;
    run_backward(job, saved, layout.planes, threads);
    return true;
}

// The gradients of (x, weight, bias, residual) that `wanted` names, and a None for autograd's last argument; or None
// if something is unusual.
PyObject *py_backward_layer(PyObject *, PyObject *const *args, Py_ssize_t given) {
    if (!introduced() || !arity(given, 7)) return nullptr;
    PyObject *g = args[1], *y = args[2], *x = args[3], *weight = args[4], *wanted = args[5];
    if (is_true(ask(torch.grad_enabled)) || !unobserved()) return PyErr_Occurred() ? nullptr : nothing();
    Layout layout(x);
    bool wide = has_dtype(x, FLOAT64);
    int64_t kind = kind_of(x, wide);
    bool usual = PyByteArray_Check(args[0]) && PyTuple_Check(wanted) && PyTuple_Size(wanted) >= 4 && layout.known && kind >= 0 && is_plain(x) && goes_along(g, kind, layout) &&
        (y == Py_None || goes_along(y, kind, layout)) &&
        PyByteArray_Size(args[0]) == Py_ssize_t((6 * layout.c + 1) * (wide ? 8 : 4)) &&
        (weight == Py_None ? PyTuple_GetItem(wanted, 2) != Py_True : (is_plain(weight) && has_dtype(weight, wide ? FLOAT64 : FLOAT32) &&
            has_values(weight, layout.c) && is_true(call(weight, torch.is_contiguous))));
    if (!usual) return PyErr_Occurred() ? nullptr : nothing();
    Ref results_of[] = {like(x, wanted, 0), like(weight, wanted, 1), like(weight, wanted, 2), like(x, wanted, 3)};
    PyObject *results[4];
    for (int i = 0; i < 4; i++)
        if (!(results[i] = results_of[i].object)) return nullptr;
    int64_t threads = PyLong_AsLongLong(args[6]);
    Ref done(none_if([&] {
        if (kind == FLOAT32) return backward_layer<float, float>(layout, args, results, threads);
        if (kind == FLOAT64) return backward_layer<double, double>(layout, args, results, threads);
        return backward_layer<bfloat16, float>(layout, args, results, threads);
    }));
    return done ? PyTuple_Pack(5, results[0], results[1], results[2], results[3], Py_None) : nullptr;
}

}  // namespace
