// A layer's forward and backward from its tensors, in the usual case; None in every other.
#pragma once

#include "calls.h"

namespace {

// Where a layer's memory and parameters were when they were found fit for the kernels. The tensors themselves are in a
// tuple, the handle: unlike a capsule, Python's garbage collector sees through it, and a parameter's hook may know the
// model.
struct Known {
    static constexpr int BUFFERS = 8, ALL = 10, SLOTS = 5;
    static constexpr int WRITTEN = ALL, NUMBERS = ALL + 1, HANDLE = ALL + 2;  // entries of the handle
    static constexpr const char *NAME = "memnorm.kernels._cpu.Known";
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
    // Null with Python's error set if it is no handle.
    static const Known *of(PyObject *handle) {
        if (PyTuple_Check(handle) && PyTuple_Size(handle) == HANDLE)
            return static_cast<const Known *>(PyCapsule_GetPointer(PyTuple_GetItem(handle, NUMBERS), NAME));
        PyErr_SetString(PyExc_TypeError, "expected what know returned");
        return nullptr;
    }
    // Whether each still is where it was. The caller keeps those places from being given to others.
    bool holds(PyObject *handle, PyObject *buffers, PyObject *parameters) const {
        for (int i = 0; i < ALL; i++) {
            PyObject *tensor = find(buffers, parameters, i);
            if (tensor != PyTuple_GetItem(handle, i) || address(tensor) != addresses[i]) return false;
            if (i < BUFFERS || tensor == Py_None) continue;
            if (!has_bytes(tensor, c * (wide ? 8 : 4)) || !is_true(call(tensor, torch.is_contiguous))) return false;
        }
        return has_values(PyTuple_GetItem(handle, SLOTS), slots * c);
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

void forget(PyObject *capsule) { delete static_cast<Known *>(PyCapsule_GetPointer(capsule, Known::NAME)); }

PyObject *py_know(PyObject *, PyObject *const *args, Py_ssize_t given) {
    if (!introduced() || !arity(given, 6)) return nullptr;
    if (!PyDict_Check(args[0]) || !PyDict_Check(args[1])) return PyErr_Format(PyExc_TypeError, "expected dictionaries");
    auto *known = new (std::nothrow) Known();
    if (!known) return PyErr_NoMemory();
    PyObject *capsule = PyCapsule_New(known, Known::NAME, forget);
    if (!capsule) delete known;
    Ref handle(capsule ? PyTuple_New(Known::HANDLE) : nullptr);
    if (!handle) return Py_XDECREF(capsule), nullptr;
    PyTuple_SetItem(handle.object, Known::NUMBERS, capsule);
    Py_INCREF(args[5]);
    PyTuple_SetItem(handle.object, Known::WRITTEN, args[5]);
    known->wide = PyObject_IsTrue(args[2]);
    known->c = PyLong_AsLongLong(args[3]);
    known->slots = PyLong_AsLongLong(args[4]);
    for (int i = 0; i < Known::ALL && !PyErr_Occurred(); i++) {
        PyObject *tensor = Known::find(args[0], args[1], i);
        if (!tensor) return PyErr_Format(PyExc_KeyError, "%U", Known::name(i));
        Py_INCREF(tensor);
        PyTuple_SetItem(handle.object, i, tensor);
        known->addresses[i] = address(tensor);
    }
    return PyErr_Occurred() ? nullptr : handle.release();
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

// The address of `other` if it can be read beside a tensor of this kind and layout; else null.
void *beside(PyObject *other, int64_t kind, const Layout &layout) {
    bool fits = is_plain(other) && has_dtype(other, kind) && layout.has_shape_of(other) && layout.matches(other);
    return fits ? address(other) : nullptr;
}

// What a forward reads and writes besides the layer.
struct Given {
    void *x, *residual;
    PyObject *y, *saved;
    bool recording;
};

template <class T, class S> bool train_layer(const Known &known, const Layout &layout, PyObject *const *args, const Given &given) {
    Forward<T, S> job;
    Memory<S> memory = known.memory<S>();
    job.n = layout.n, job.c = layout.c, job.l = layout.l;
    job.x = static_cast<const T *>(given.x);
    job.weight = static_cast<const S *>(known.addresses[8]);
    job.bias = static_cast<const S *>(known.addresses[9]);
    job.residual = static_cast<const T *>(given.residual);
    job.rectify = args[5] == Py_True;
    job.y = static_cast<T *>(address(given.y));
    write_to(job, reinterpret_cast<S *>(PyByteArray_AsString(given.saved)));
    Arguments in{args + 9};
    job.eps = in.number();
    memory.decay = in.number();
    memory.prior_weight = in.number();
    memory.prior_always = in.integer() != 0;
    memory.evenly = in.integer() != 0;
    memory.shift = true;
    int64_t threads = PyLong_AsLongLong(args[7]);
    if (PyErr_Occurred()) return false;
    double strength = *static_cast<const double *>(known.addresses[0]);
    Unlocked unlocked;
    run_train(job, memory, strength, given.recording, layout.planes, threads);
    return true;
}

PyObject *nothing() {
    Py_INCREF(Py_None);
    return Py_None;
}

// None, unless there is an error.
PyObject *left_to_others() { return PyErr_Occurred() ? nullptr : nothing(); }

// (y, saved), or None if something is unusual.
PyObject *py_train_layer(PyObject *, PyObject *const *args, Py_ssize_t given) {
    if (!arity(given, 14)) return nullptr;
    const Known *known = Known::of(args[0]);
    PyObject *x = args[3], *residual = args[4], *ranks = args[6];
    if (!known) return nullptr;
    if (!PyTuple_Check(ranks)) return PyErr_Format(PyExc_TypeError, "expected a tuple of ranks");
    if (!unobserved() || !once() || !is_plain(x) || !PyDict_Check(args[1]) || !PyDict_Check(args[2])) return left_to_others();
    Layout layout(x);
    int64_t kind = kind_of(x, known->wide);
    bool usual = layout.known && kind >= 0 && layout.c == known->c && layout.c > 0 && layout.n * layout.l > 1 &&
        among(ranks, PyTuple_Size(layout.shape.object)) && known->holds(args[0], args[1], args[2]);
    if (!usual) return left_to_others();
    bool adds = residual != Py_None;
    void *added = adds && args[5] == Py_True ? beside(residual, kind, layout) : nullptr, *data = address(x);
    if (!data || (adds && !added) || PyErr_Occurred()) return left_to_others();
    Ref y(PyObject_CallFunctionObjArgs(torch.empty_like, x, nullptr));
    if (!y) return nullptr;
    Ref saved(PyByteArray_FromStringAndSize(nullptr, (6 * layout.c + 1) * (known->wide ? 8 : 4)));
    int recording = PyObject_IsTrue(args[8]);
    if (!saved || recording < 0) return nullptr;
    Given tensors{data, added, y.object, saved.object, recording == 1};
    Ref done(none_if([&] {
        if (kind == FLOAT32) return train_layer<float, float>(*known, layout, args, tensors);
        if (kind == FLOAT64) return train_layer<double, double>(*known, layout, args, tensors);
        return train_layer<bfloat16, float>(*known, layout, args, tensors);
    }));
    if (!done) return nullptr;
    PyObject *written = PyTuple_GetItem(args[0], Known::WRITTEN);
    if (recording && !Ref(PyObject_CallFunctionObjArgs(torch.increment_version, written, nullptr))) return nullptr;
    return PyTuple_Pack(2, y.object, saved.object);
}

// Where the tensors are that a backward reads.
struct Read {
    void *g, *y, *x, *weight;
};

// Whether they are all as usual.
bool look(PyObject *const *args, int64_t kind, const Layout &layout, Read &found) {
    PyObject *g = args[1], *y = args[2], *x = args[3], *weight = args[4], *wanted = args[5];
    int64_t statistics = kind == FLOAT64 ? FLOAT64 : FLOAT32, width = kind == FLOAT64 ? 8 : 4;
    if (!PyByteArray_Check(args[0]) || PyByteArray_Size(args[0]) != Py_ssize_t((6 * layout.c + 1) * width)) return false;
    if (!PyTuple_Check(wanted) || PyTuple_Size(wanted) < 4) return false;
    found = {};
    if (!(found.g = beside(g, kind, layout)) || !(found.x = address(x))) return false;
    if (y != Py_None && !(found.y = beside(y, kind, layout))) return false;
    if (weight == Py_None) return PyTuple_GetItem(wanted, 2) != Py_True;
    bool fits = is_plain(weight) && has_dtype(weight, statistics) && has_values(weight, layout.c) &&
        is_true(call(weight, torch.is_contiguous));
    return fits && (found.weight = address(weight));
}

// A tensor for the gradient of an argument; None if it is not wanted.
PyObject *like(PyObject *tensor, PyObject *wanted, Py_ssize_t argument) {
    if (PyTuple_GetItem(wanted, argument) != Py_True) return nothing();
    return PyObject_CallFunctionObjArgs(torch.empty_like, tensor, nullptr);
}

// A `Past` of memnorm/kernels/cpu.py: the backward memory of a layer, and where it was when it was checked.
struct Past {
    static constexpr Py_ssize_t ADDRESSES = 4, WIDE = 8, CHANNELS = 9, FIELDS = 11;
    void *addresses[4] = {};
    bool recording = false;

    // Return true if the tensors are still at these addresses and fit the data. None means that there is no memory.
    bool look(PyObject *known, PyObject *records, bool wide, int64_t c) {
        if (known == Py_None) return records == Py_None;
        if (!PyTuple_Check(known) || PyTuple_Size(known) != FIELDS) return false;
        for (int i = 0; i < 4; i++) {
            addresses[i] = address(PyTuple_GetItem(known, i));
            if (addresses[i] != PyLong_AsVoidPtr(PyTuple_GetItem(known, ADDRESSES + i))) return false;
        }
        recording = records == Py_True;
        bool is_wide = PyTuple_GetItem(known, WIDE) == Py_True;
        return is_wide == wide && PyLong_AsLongLong(PyTuple_GetItem(known, CHANNELS)) == c;
    }
};

template <class T, class S>
bool backward_layer(
    const Layout &layout, PyObject *saved, const Read &read, PyObject *results, int64_t threads, const Past &past) {
    Backward<T, S> job;
    BackwardMemory<S> memory;
    memory.mean = static_cast<S *>(past.addresses[0]);
    memory.product = static_cast<S *>(past.addresses[1]);
    memory.weight = static_cast<S *>(past.addresses[2]);
    memory.strength = static_cast<const double *>(past.addresses[3]);
    memory.recording = past.recording;
    auto result = [=](Py_ssize_t i) { return address(PyTuple_GetItem(results, i)); };
    job.n = layout.n, job.c = layout.c, job.l = layout.l;
    job.g = static_cast<const T *>(read.g);
    job.y = static_cast<const T *>(read.y);
    job.x = static_cast<const T *>(read.x);
    job.weight = static_cast<const S *>(read.weight);
    job.dx = static_cast<T *>(result(0));
    job.grad_weight = static_cast<S *>(result(1));
    job.grad_bias = static_cast<S *>(result(2));
    job.d_residual = static_cast<T *>(result(3));
    std::vector<S> unwanted(std::size_t(job.grad_weight && job.grad_bias ? 0 : 2 * job.c));
    if (!job.grad_weight) job.grad_weight = unwanted.data();
    if (!job.grad_bias) job.grad_bias = unwanted.data() + job.c;  // not the same place: both are recorded
    const S *numbers = reinterpret_cast<const S *>(PyByteArray_AsString(saved));
    if (PyErr_Occurred()) return false;
    Unlocked unlocked;
    run_backward(job, numbers, memory, layout.planes, threads);
    return true;
}

// The gradients of (x, weight, bias, residual) that `wanted` names, and a None for autograd's last argument; or None
// if something is unusual.
PyObject *py_backward_layer(PyObject *, PyObject *const *args, Py_ssize_t given) {
    if (!introduced() || !arity(given, 9)) return nullptr;
    PyObject *saved = args[0], *x = args[3], *weight = args[4], *wanted = args[5];
    int64_t threads = PyLong_AsLongLong(args[6]);
    if (PyErr_Occurred() || is_true(ask(torch.grad_enabled)) || !unobserved() || !is_plain(x)) return left_to_others();
    Layout layout(x);
    int64_t kind = kind_of(x, has_dtype(x, FLOAT64));
    Read read;
    Past past;
    if (!layout.known || kind < 0 || !look(args, kind, layout, read)) return left_to_others();
    if (!past.look(args[7], args[8], kind == FLOAT64, layout.c)) return left_to_others();
    Ref results(PyTuple_New(5));
    for (Py_ssize_t i = 0; results && i < 5; i++) {
        PyObject *one = i < 4 ? like(i == 0 || i == 3 ? x : weight, wanted, i) : nothing();
        if (!one || PyTuple_SetItem(results.object, i, one)) return nullptr;
    }
    if (!results) return nullptr;
    Ref done(none_if([&] {
        if (kind == FLOAT32) return backward_layer<float, float>(layout, saved, read, results.object, threads, past);
        if (kind == FLOAT64) return backward_layer<double, double>(layout, saved, read, results.object, threads, past);
        return backward_layer<bfloat16, float>(layout, saved, read, results.object, threads, past);
    }));
    if (!done) return nullptr;
    if (past.recording) {
        Ref written(PyTuple_GetSlice(args[7], 0, 3));
        if (!written || !Ref(PyObject_CallFunctionObjArgs(torch.increment_version, written.object, nullptr))) return nullptr;
    }
    return results.release();
}

}  // namespace
