// Tensors as Python objects. A small layer takes less time than the Python that would look at its tensors, so the usual
// case is looked at here: dense tensors of torch's own classes. Whatever is unusual is left to memnorm/kernels/cpu.py.
#pragma once

#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030A0000
#include <Python.h>

#include <cstdint>

// A reference that is given back when the scope is left.
struct Ref {
    PyObject *object;

    explicit Ref(PyObject *owned) : object(owned) {}
    Ref(Ref &&other) noexcept : object(other.release()) {}
    Ref(const Ref &) = delete;
    ~Ref() { Py_XDECREF(object); }
    PyObject *release() {
        PyObject *given = object;
        object = nullptr;
        return given;
    }
    explicit operator bool() const { return object != nullptr; }
};

// What torch calls its things; `introduce` fills it in.
struct Torch {
    PyObject *tensor, *parameter, *strided, *dtypes[3];  // float32, float64, bfloat16
    PyObject *empty_like, *increment_version;
    PyObject *observers;      // functions, each of which answers whether someone looks at operations
    PyObject *forward_ad;     // a module that knows the level of forward-mode AD
    PyObject *grad_enabled, *forward_grad_enabled, *running_backward, *saved_hooks;  // functions
    PyObject *data_ptr, *shape, *dtype, *layout, *is_cpu, *is_neg, *is_contiguous, *stride, *numel, *nbytes, *current_level;  // names
};
static Torch torch;

inline bool introduce(PyObject *const *given) {
    PyObject **objects[] = {&torch.tensor, &torch.parameter, &torch.strided, &torch.dtypes[0], &torch.dtypes[1],
        &torch.dtypes[2], &torch.empty_like, &torch.increment_version, &torch.observers, &torch.forward_ad,
        &torch.grad_enabled, &torch.forward_grad_enabled, &torch.running_backward, &torch.saved_hooks};
    for (auto *object : objects) {
        Py_INCREF(*given);
        *object = *given++;
    }
    const char *words[] = {"data_ptr", "shape", "dtype", "layout", "is_cpu", "is_neg", "is_contiguous", "stride", "numel", "nbytes", "_current_level"};
    PyObject **names[] = {&torch.data_ptr, &torch.shape, &torch.dtype, &torch.layout, &torch.is_cpu, &torch.is_neg,
        &torch.is_contiguous, &torch.stride, &torch.numel, &torch.nbytes, &torch.current_level};
    for (std::size_t i = 0; i < sizeof(words) / sizeof(*words); i++)
        if (!(*names[i] = PyUnicode_InternFromString(words[i]))) return false;
    return true;
}

inline bool introduced() {
    if (!torch.tensor) PyErr_SetString(PyExc_RuntimeError, "call introduce first");
    return torch.tensor;
}

inline Ref attribute(PyObject *object, PyObject *name) { return Ref(PyObject_GetAttr(object, name)); }
inline Ref call(PyObject *object, PyObject *name) { return Ref(PyObject_CallMethodObjArgs(object, name, nullptr)); }
inline bool is_true(const Ref &answer) { return answer.object == Py_True; }

inline Ref ask(PyObject *function) { return Ref(PyObject_CallNoArgs(function)); }
inline bool is(const Ref &number, long wanted) { return number && PyLong_AsLong(number.object) == wanted; }

// Whether autograd alone is looking: no transform, no dispatch mode, no tracer, no forward-mode AD.
inline bool unobserved() {
    for (Py_ssize_t i = 0; i < PyTuple_Size(torch.observers); i++) {
        Ref answer = ask(PyTuple_GetItem(torch.observers, i));
        if (!answer || PyObject_IsTrue(answer.object)) return false;
    }
    return is(attribute(torch.forward_ad, torch.current_level), -1);
}

// Whether this forward runs for the first and only time: not inside a backward, not where it may be recomputed.
inline bool once() {
    if (!is(ask(torch.running_backward), -1)) return false;
    if (!is_true(ask(torch.grad_enabled)) && !is_true(ask(torch.forward_grad_enabled))) return false;
    Ref hooks(PyObject_CallFunctionObjArgs(torch.saved_hooks, Py_True, nullptr));
    return hooks.object == Py_None;
}

// Of a tensor's first value; null without a tensor, and with Python's error set if there is no address.
inline void *address(PyObject *tensor) {
    if (tensor == Py_None) return nullptr;
    Ref number = call(tensor, torch.data_ptr);
    return number ? PyLong_AsVoidPtr(number.object) : nullptr;
}

inline bool has_dtype(PyObject *tensor, int64_t kind) { return attribute(tensor, torch.dtype).object == torch.dtypes[kind]; }

inline bool has_bytes(PyObject *tensor, int64_t count) {
    Ref number = attribute(tensor, torch.nbytes);
    return number && PyLong_AsLongLong(number.object) == count;
}

inline bool has_values(PyObject *tensor, int64_t count) {
    Ref number = call(tensor, torch.numel);
    return number && PyLong_AsLongLong(number.object) == count;
}

// Whether it is one of torch's own tensors, dense and in the processor's memory.
inline bool is_plain(PyObject *tensor) {
    PyObject *type = reinterpret_cast<PyObject *>(Py_TYPE(tensor));
    return (type == torch.tensor || type == torch.parameter) && is_true(attribute(tensor, torch.is_cpu)) &&
        attribute(tensor, torch.layout).object == torch.strided && !is_true(call(tensor, torch.is_neg));
}

// The layout of a tensor (N, C, …): its strides if these are rows of channels; null if its values lie in their order.
struct Layout {
    bool known = false, planes = false;
    int64_t n = 0, c = 0, l = 1;
    Ref shape{nullptr}, strides{nullptr};

    explicit Layout(PyObject *x) : shape(attribute(x, torch.shape)) {
        if (!shape || !PyTuple_Check(shape.object) || PyTuple_Size(shape.object) < 2) return;
        n = at(shape, 0), c = at(shape, 1);
        for (Py_ssize_t i = 2; i < PyTuple_Size(shape.object); i++) l *= at(shape, i);
        if (is_true(call(x, torch.is_contiguous))) {
            known = true, planes = c > 1 && l > 1;
        } else {
            strides.object = call(x, torch.stride).release();
            known = strides && is_rows();
        }
    }
    // Whether another tensor of that shape has the same layout.
    bool matches(PyObject *other) const {
        if (!strides) return is_true(call(other, torch.is_contiguous));
        Ref its = call(other, torch.stride);
        return its && PyObject_RichCompareBool(its.object, strides.object, Py_EQ) == 1;
    }
    bool has_shape_of(PyObject *other) const {
        Ref its = attribute(other, torch.shape);
        return its && PyObject_RichCompareBool(its.object, shape.object, Py_EQ) == 1;
    }

private:
    static int64_t at(const Ref &tuple, Py_ssize_t i) { return PyLong_AsLongLong(PyTuple_GetItem(tuple.object, i)); }
    bool is_rows() const {  // of images and volumes alone: of a series, torch's batch norm makes a copy in order
        if (PyTuple_Size(shape.object) < 4) return false;
        int64_t expected = c;
        for (Py_ssize_t i = PyTuple_Size(shape.object) - 1; i >= 2; i--) {
            if (at(strides, i) != expected) return false;
            expected *= at(shape, i);
        }
        return at(strides, 1) == 1 && at(strides, 0) == expected;
    }
};
