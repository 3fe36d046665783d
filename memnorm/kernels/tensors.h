// Tensors as Python objects. Checking a small layer's tensors in Python takes longer than the layer, so it is done here.
// The kernels read dense tensors of torch's own classes in CPU memory; memnorm/kernels/cpu.py prepares others.
#pragma once

#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030A0000
#include <Python.h>

#include <cstdint>

// A reference that is released at the end of the scope.
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

// Objects and attribute names of torch; `introduce` fills them in.
struct Torch {
    PyObject *tensor, *parameter, *dtypes[3];  // float32, float64, bfloat16
    PyObject *int64, *empty_like, *increment_version;
    PyObject *observers;   // functions that return a true value while something else than autograd sees operations
    PyObject *forward_ad;  // the module that holds the level of forward-mode AD
    PyObject *grad_enabled, *forward_grad_enabled, *running_backward, *saved_hooks, *inference_mode;  // functions
    PyObject *data_ptr, *shape, *dtype, *is_cpu, *is_neg, *is_contiguous, *stride, *nbytes, *current_level;  // names
    PyObject *grad, *requires_grad, *is_inference, *detach;
};
static Torch torch;
constexpr Py_ssize_t INTRODUCED = 15;

inline bool introduce(PyObject *const *given) {
    PyObject **objects[INTRODUCED] = {&torch.tensor, &torch.parameter, &torch.dtypes[0], &torch.dtypes[1],
        &torch.dtypes[2], &torch.int64, &torch.empty_like, &torch.increment_version, &torch.observers, &torch.forward_ad,
        &torch.grad_enabled, &torch.forward_grad_enabled, &torch.running_backward, &torch.saved_hooks,
        &torch.inference_mode};
    for (auto *object : objects) {
        Py_INCREF(*given);
        *object = *given++;
    }
    const char *words[] = {"data_ptr", "shape", "dtype", "is_cpu", "is_neg", "is_contiguous", "stride", "nbytes",
        "_current_level", "grad", "requires_grad", "is_inference", "detach"};
    PyObject **names[] = {&torch.data_ptr, &torch.shape, &torch.dtype, &torch.is_cpu, &torch.is_neg,
        &torch.is_contiguous, &torch.stride, &torch.nbytes, &torch.current_level, &torch.grad, &torch.requires_grad,
        &torch.is_inference, &torch.detach};
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

// True if no functorch transform, dispatch mode, tracer or forward-mode AD is active.
inline bool unobserved() {
    for (Py_ssize_t i = 0; i < PyTuple_Size(torch.observers); i++) {
        Ref answer = ask(PyTuple_GetItem(torch.observers, i));
        if (!answer || PyObject_IsTrue(answer.object)) return false;
    }
    return is(attribute(torch.forward_ad, torch.current_level), -1);
}

// True if this forward runs only once: not inside a backward, and not where activation checkpointing may repeat it.
inline bool runs_once() {
    if (!is(ask(torch.running_backward), -1)) return false;
    if (!is_true(ask(torch.grad_enabled)) && !is_true(ask(torch.forward_grad_enabled)) && !is_true(ask(torch.inference_mode)))
        return false;
    Ref hooks(PyObject_CallFunctionObjArgs(torch.saved_hooks, Py_True, nullptr));
    return hooks.object == Py_None;
}

// The address of a tensor's first value; null for None, and null with Python's error set if there is no address.
inline void *address(PyObject *tensor) {
    if (tensor == Py_None) return nullptr;
    Ref number = call(tensor, torch.data_ptr);
    return number ? PyLong_AsVoidPtr(number.object) : nullptr;
}

inline bool has_dtype(PyObject *tensor, PyObject *dtype) { return attribute(tensor, torch.dtype).object == dtype; }

// True for a tensor of torch's own classes in CPU memory without a pending negation. One that is not strided has no
// address.
inline bool is_plain(PyObject *tensor) {
    PyObject *type = reinterpret_cast<PyObject *>(Py_TYPE(tensor));
    return (type == torch.tensor || type == torch.parameter) && is_true(attribute(tensor, torch.is_cpu)) &&
        !is_true(call(tensor, torch.is_neg));
}

inline int64_t bytes_of(PyObject *tensor) {
    Ref size = attribute(tensor, torch.nbytes);
    return size ? PyLong_AsLongLong(size.object) : -1;
}

// True for a contiguous plain tensor of this dtype and size.
inline bool is_vector(PyObject *tensor, PyObject *dtype, int64_t bytes) {
    return is_plain(tensor) && has_dtype(tensor, dtype) && bytes_of(tensor) == bytes && is_true(call(tensor, torch.is_contiguous));
}

// A new tensor like this one, of this size; null with Python's error set if something else came out, because a function
// mode replaced the function or another thread the tensor's data.
inline PyObject *empty_like(PyObject *tensor, int64_t bytes) {
    Ref made(PyObject_CallFunctionObjArgs(torch.empty_like, tensor, nullptr));
    if (!made) return nullptr;
    if (bytes_of(made.object) == bytes && address(made.object)) return made.release();
    if (!PyErr_Occurred()) PyErr_SetString(PyExc_RuntimeError, "torch.empty_like returned a tensor of another kind");
    return nullptr;
}

// The layout of a tensor (N, C, …). `strides` is set if its values are rows of channels, and null if it is contiguous.
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
    // True if a tensor of the same shape has the same layout.
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
    bool is_rows() const {  // images and volumes only: torch's batch norm copies a series into contiguous memory
        if (PyTuple_Size(shape.object) < 4) return false;
        int64_t expected = c;
        for (Py_ssize_t i = PyTuple_Size(shape.object) - 1; i >= 2; i--) {
            if (at(strides, i) != expected) return false;
            expected *= at(shape, i);
        }
        return at(strides, 1) == 1 && at(strides, 0) == expected;
    }
};
