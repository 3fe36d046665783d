// Tensors as Python objects. Checking a small layer's tensors in Python takes longer than the layer, so it is done here.
// The kernels read dense tensors of torch's own classes in CPU memory; memnorm/kernels/cpu.py prepares others.
#pragma once

#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030A0000
#include <Python.h>

#include <cstdint>
#include <cstring>
#include <utility>

// A reference that is released at the end of the scope.
struct Ref {
    PyObject *object;

    explicit Ref(PyObject *owned) : object(owned) {}
    Ref(Ref &&other) noexcept : object(other.release()) {}
    Ref(const Ref &) = delete;
    Ref &operator=(Ref &&other) noexcept {
        std::swap(object, other.object);
        return *this;
    }
    ~Ref() { Py_XDECREF(object); }
    PyObject *release() {
        PyObject *given = object;
        object = nullptr;
        return given;
    }
    explicit operator bool() const { return object != nullptr; }
};

// What torch tells of a tensor through DLPack, and the table of functions in which it offers this. The layout of both is
// fixed by version 1 of DLPack's binary interface.
struct Description {
    void *data;
    int32_t device, device_number, rank;
    uint8_t code, bits;
    uint16_t lanes;
    const int64_t *shape, *strides;
    uint64_t offset;
};
struct Exchange {
    uint32_t version, minor_version;
    void *older, *allocate, *to_owner, *from_owner;
    int (*describe)(PyObject *tensor, Description *found);  // -1 with Python's error set if it cannot
};

// Objects and attribute names of torch; `introduce` fills them in.
struct Torch {
    PyObject *tensor, *parameter, *dtypes[4];  // in the order of Kind
    PyObject *empty_like, *increment_version;
    PyObject *observers;   // functions that return a true value while something else than autograd sees operations
    PyObject *forward_ad;  // the module that holds the level of forward-mode AD
    PyObject *grad_enabled, *forward_grad_enabled, *running_backward, *saved_hooks, *inference_mode, *get_num_threads;  // functions
    PyObject *exchange;    // a capsule with the table above; None in versions of torch without it
    PyObject *data_ptr, *shape, *dtype, *is_cpu, *is_neg, *stride, *current_level, *grad, *requires_grad, *is_inference, *detach, *count_backward;  // names
};
static Torch torch;
static const Exchange *exchange;
constexpr Py_ssize_t INTRODUCED = 17;

inline bool introduce(PyObject *const *given) {
    PyObject **objects[INTRODUCED] = {&torch.tensor, &torch.parameter, &torch.dtypes[0], &torch.dtypes[1],
        &torch.dtypes[2], &torch.dtypes[3], &torch.empty_like, &torch.increment_version, &torch.observers, &torch.forward_ad,
        &torch.grad_enabled, &torch.forward_grad_enabled, &torch.running_backward, &torch.saved_hooks,
        &torch.inference_mode, &torch.get_num_threads, &torch.exchange};
    for (auto *object : objects) {
        Py_INCREF(*given);
        *object = *given++;
    }
    const char *words[] = {"data_ptr", "shape", "dtype", "is_cpu", "is_neg", "stride", "_current_level", "grad",
        "requires_grad", "is_inference", "detach", "_count_backward"};
    PyObject **names[] = {&torch.data_ptr, &torch.shape, &torch.dtype, &torch.is_cpu, &torch.is_neg, &torch.stride,
        &torch.current_level, &torch.grad, &torch.requires_grad, &torch.is_inference, &torch.detach, &torch.count_backward};
    for (std::size_t i = 0; i < sizeof(words) / sizeof(*words); i++)
        if (!(*names[i] = PyUnicode_InternFromString(words[i]))) return false;
    exchange = nullptr;
    if (torch.exchange != Py_None) {
        auto *table = static_cast<const Exchange *>(PyCapsule_GetPointer(torch.exchange, "dlpack_exchange_api"));
        if (!table) return false;
        if (table->version == 1 && table->describe) exchange = table;
    }
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

enum Kind { FLOAT32, FLOAT64, BFLOAT16, INT64, OTHER };
inline int64_t size_of(int kind) { return kind == FLOAT32 ? 4 : kind == BFLOAT16 ? 2 : 8; }

// A tensor's address, kind and layout. One that is not in CPU memory, or not strided, has kind OTHER.
struct View {
    static constexpr int MOST = 64;  // dimensions, as in torch's own operations
    void *data = nullptr;
    int kind = OTHER, rank = 0;
    int64_t shape[MOST], strides[MOST];

    View() = default;
    explicit View(PyObject *tensor) {
        if (!(exchange ? described(tensor) : read(tensor))) PyErr_Clear(), kind = OTHER, data = nullptr;
    }
    // The view of a tensor of torch's own classes without a pending negation. Other objects have kind OTHER.
    static View plain(PyObject *tensor) {
        PyObject *type = reinterpret_cast<PyObject *>(Py_TYPE(tensor));
        bool usual = (type == torch.tensor || type == torch.parameter) && !is_true(call(tensor, torch.is_neg));
        return usual ? View(tensor) : View();
    }
    int64_t numel() const {
        int64_t count = 1;
        for (int i = 0; i < rank; i++) count *= shape[i];
        return count;
    }
    int64_t bytes() const { return numel() * size_of(kind); }
    bool is_contiguous() const { return contiguous_from(0, rank - 1, 1); }
    // True if the values lie as rows of channels.
    bool is_rows() const { return rank > 2 && strides[1] == 1 && contiguous_from(2, rank - 1, shape[1], true) && strides[0] == shape[1] * spatial(); }
    int64_t spatial() const {
        int64_t count = 1;
        for (int i = 2; i < rank; i++) count *= shape[i];
        return count;
    }
    bool is_vector(int wanted, int64_t count) const { return kind == wanted && numel() == count && is_contiguous(); }
    bool has_shape_of(const View &other) const { return rank == other.rank && !std::memcmp(shape, other.shape, sizeof(*shape) * std::size_t(rank)); }
    bool has_strides_of(const View &other) const { return !std::memcmp(strides, other.strides, sizeof(*strides) * std::size_t(rank)); }

private:
    // True if the dimensions [first, last] lie without gaps, the last with this stride. The stride of a dimension of
    // one does not matter, unless `exactly`.
    bool contiguous_from(int first, int last, int64_t stride, bool exactly = false) const {
        for (int i = last; i >= first; stride *= shape[i--])
            if ((exactly || shape[i] != 1) && strides[i] != stride) return false;
        return true;
    }
    bool described(PyObject *tensor) {
        Description found;
        constexpr int CPU = 1;
        if (exchange->describe(tensor, &found) || found.device != CPU || found.rank > MOST || found.lanes != 1) return false;
        constexpr int INTEGER = 0, FLOAT = 2, BFLOAT = 4;
        bool real = found.code == FLOAT;
        kind = real && found.bits == 32 ? FLOAT32 : real && found.bits == 64 ? FLOAT64
            : found.code == BFLOAT ? BFLOAT16 : found.code == INTEGER && found.bits == 64 ? INT64 : OTHER;
        data = found.data, rank = found.rank;
        std::memcpy(shape, found.shape, sizeof(*shape) * std::size_t(rank));
        std::memcpy(strides, found.strides, sizeof(*strides) * std::size_t(rank));
        return kind != OTHER;
    }
    // The same by the tensor's attributes, which takes much longer.
    bool read(PyObject *tensor) {
        Ref dtype = attribute(tensor, torch.dtype);
        while (kind = kind == OTHER ? 0 : kind + 1, kind < OTHER && dtype.object != torch.dtypes[kind]) {}
        if (kind == OTHER || !is_true(attribute(tensor, torch.is_cpu))) return false;
        Ref address = call(tensor, torch.data_ptr), sizes = attribute(tensor, torch.shape), steps = call(tensor, torch.stride);
        if (!address || !sizes || !steps || (rank = int(PyTuple_Size(sizes.object))) > MOST) return false;
        data = PyLong_AsVoidPtr(address.object);
        for (int i = 0; i < rank; i++) {
            shape[i] = PyLong_AsLongLong(PyTuple_GetItem(sizes.object, i));
            strides[i] = PyLong_AsLongLong(PyTuple_GetItem(steps.object, i));
        }
        return !PyErr_Occurred();
    }
};

// A new tensor like this one, of this size; null with Python's error set if something else came out, because a function
// mode replaced the function or another thread the tensor's data.
inline PyObject *empty_like(PyObject *tensor, int64_t bytes, void *&data) {
    Ref made(PyObject_CallFunctionObjArgs(torch.empty_like, tensor, nullptr));
    if (!made) return nullptr;
    View view(made.object);
    if (view.kind != OTHER && view.bytes() == bytes && (data = view.data)) return made.release();
    PyErr_SetString(PyExc_RuntimeError, "torch.empty_like returned a tensor of another kind");
    return nullptr;
}
