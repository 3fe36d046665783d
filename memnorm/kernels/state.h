// The buffers of a layer as the kernels use them.
#pragma once

#include "record.h"
#include "tensors.h"

#include <new>

namespace {

enum Field { PARAMETERS, LAYER_BUFFERS, CHECKED, EPS, MOMENTUM, DECAY, PRIOR_WEIGHT, PRIOR_FROM_INIT, RECORDING, TRACKING, SYNC, OUTGOING,
    OUTGOING_BACKWARD, HAS_OPTIMIZER, WEIGHT_NAME, BIAS_NAME, FIELDS };

// The attributes of a layer in Python, read from its dictionary.
struct LayerFields {
    PyObject *layer;
    Ref own;

    explicit LayerFields(PyObject *layer) : layer(layer), own(layer ? PyObject_GenericGetDict(layer, nullptr) : nullptr) {}
    explicit operator bool() const { return own && PyDict_Check(own.object); }

    static PyObject *name(Field i) {
        static const char *words[FIELDS] = {"_parameters", "_buffers", "_handle", "eps", "momentum", "decay", "prior_weight",
            "prior_from_init", "recording", "track_running_stats", "sync", "_outgoing", "_outgoing_backward",
            "_has_optimizer", "weight", "bias"};
        static PyObject *names[FIELDS];
        return names[i] ? names[i] : names[i] = PyUnicode_InternFromString(words[i]);
    }
    // Borrowed; None if only the layer's class has this attribute.
    PyObject *get(Field i) const {
        PyObject *found = PyDict_GetItem(own.object, name(i));
        return found ? found : Py_None;
    }
    double number(Field i) const { return PyFloat_AsDouble(get(i)); }
    // Owned; null if the layer computes this parameter from others.
    Ref parameter(Field i) const {
        PyObject *all = get(PARAMETERS), *found = PyDict_Check(all) ? PyDict_GetItem(all, name(i)) : nullptr;
        Py_XINCREF(found);
        return Ref(found);
    }
    bool records() const {
        PyObject *found = PyDict_GetItem(own.object, name(RECORDING));
        return !found || PyObject_IsTrue(found) == 1;
    }
    // True if the layer has a memory and shares no batches with other processes.
    bool trains_alone() const {
        return get(SYNC) == Py_False && get(OUTGOING) == Py_None && PyObject_IsTrue(get(TRACKING)) == 1;
    }
};

enum Buffer { STRENGTH, MEAN, VAR, WEIGHT, BATCHES, SLOT_MEANS, SLOT_VARS, SLOT_COUNTS, BACKWARD_MEAN, BACKWARD_PRODUCT,
    BACKWARD_WEIGHT, IMAGES, BUFFERS };

// The addresses of a layer's buffers when they were checked. A handle is a tuple: the buffers, their detached aliases,
// and this object in a capsule. While an alias lives, its storage does; so a buffer that is still at its address is the
// memory that was checked. Tensors are kept in a tuple, which Python's garbage collector can traverse.
struct State {
    static constexpr int ALIASES = BUFFERS, CAPSULE = BUFFERS + 1, HANDLE = BUFFERS + 2;
    static constexpr const char *NAME = "memnorm.kernels._cpu.State";
    void *addresses[BUFFERS] = {};
    int64_t wide = 0, c = 0, slots = 0;

    static PyObject *name(int i) {
        static const char *words[BUFFERS] = {"strength", "running_mean", "running_var", "running_weight", "num_batches_tracked",
            "memory_mean", "memory_var", "memory_count", "backward_mean", "backward_product", "backward_weight",
            "num_images"};
        static PyObject *names[BUFFERS];
        return names[i] ? names[i] : names[i] = PyUnicode_InternFromString(words[i]);
    }

    // Null with Python's error set if the object is no handle.
    static const State *of(PyObject *handle) {
        if (PyTuple_Check(handle) && PyTuple_Size(handle) == HANDLE)
            return static_cast<const State *>(PyCapsule_GetPointer(PyTuple_GetItem(handle, CAPSULE), NAME));
        PyErr_SetString(PyExc_TypeError, "expected what check returned");
        return nullptr;
    }

    // True if these buffers of the handle are still at their addresses.
    bool holds(PyObject *handle, int first, int end) const {
        for (int i = first; i < end; i++)
            if (addresses[i] && View(PyTuple_GetItem(handle, i)).data != addresses[i]) return false;
        return true;
    }
    // True if this buffer of the handle is the layer's, still at its address.
    bool holds(PyObject *handle, PyObject *buffers, int i) const {
        return PyDict_GetItem(buffers, name(i)) == PyTuple_GetItem(handle, i) && holds(handle, i, i + 1);
    }
    // True if these are the layer's buffers of forward, still at their addresses.
    bool holds(PyObject *handle, PyObject *buffers) const {
        if (!PyDict_Check(buffers)) return false;
        for (int i = 0; i < BACKWARD_MEAN; i++)
            if (!holds(handle, buffers, i)) return false;
        // A slot buffer that was cut in place keeps its address.
        return (!addresses[IMAGES] || holds(handle, buffers, IMAGES)) &&
            (!slots || View(PyTuple_GetItem(handle, SLOT_COUNTS)).numel() == slots);
    }

    // Check the buffers of a layer and fill in their addresses.
    bool check(PyObject *const *tensors) {
        View mean = View::plain(tensors[MEAN]);
        wide = mean.kind == FLOAT64, c = mean.numel(), slots = View::plain(tensors[SLOT_COUNTS]).numel();
        int64_t counts[BUFFERS] = {1, c, c, 1, 1, slots * c, slots * c, slots, c, c, 1, 1};
        bool remembers_backward = tensors[BACKWARD_MEAN] != Py_None;
        for (int i = 0; i < (remembers_backward ? BUFFERS : BACKWARD_MEAN); i++) {
            View view = View::plain(tensors[i]);
            int kind = i == STRENGTH ? FLOAT64 : i == BATCHES || i == IMAGES ? INT64 : wide ? FLOAT64 : FLOAT32;
            if (!view.is_vector(kind, counts[i]) || is_true(call(tensors[i], torch.is_inference))) return false;
            if (counts[i] && !(addresses[i] = view.data)) return false;
        }
        return c > 0;
    }

    template <class S> S *at(int i) const { return static_cast<S *>(addresses[i]); }
    template <class S> Memory<S> memory() const {
        Memory<S> found;
        found.running_mean = at<S>(MEAN), found.running_var = at<S>(VAR), found.running_weight = at<S>(WEIGHT);
        found.batches = at<int64_t>(BATCHES), found.images = at<int64_t>(IMAGES);
        found.means = at<S>(SLOT_MEANS), found.vars = at<S>(SLOT_VARS), found.counts = at<S>(SLOT_COUNTS);
        found.slots = slots, found.c = c;
        return found;
    }
    template <class S> BackwardMemory<S> backward_memory(bool reading) const {
        BackwardMemory<S> found;
        found.mean = at<S>(BACKWARD_MEAN), found.product = at<S>(BACKWARD_PRODUCT), found.weight = at<S>(BACKWARD_WEIGHT);
        found.strength = reading ? at<double>(STRENGTH) : nullptr;
        return found;
    }
};

inline void forget(PyObject *capsule) { delete static_cast<State *>(PyCapsule_GetPointer(capsule, State::NAME)); }

// The handle of these buffers; null without an error if the kernels cannot use them, null with one if memory is out.
inline PyObject *make_handle(PyObject *buffers) {
    // A list owns the tensors before they are checked: another thread may replace them in the dictionary meanwhile. It
    // may also find a tuple through the garbage collector, which could then not be filled any more.
    Ref owned(PyList_New(0)), aliases(PyList_New(0));
    if (!owned || !aliases) return nullptr;
    PyObject *tensors[BUFFERS];
    for (int i = 0; i < BUFFERS; i++) {
        tensors[i] = PyDict_GetItem(buffers, State::name(i));
        if (!tensors[i]) tensors[i] = Py_None;
        if (tensors[i] == Py_None && i < BACKWARD_MEAN) return nullptr;
        if (PyList_Append(owned.object, tensors[i])) return nullptr;
    }
    auto *state = new (std::nothrow) State();
    if (!state) return PyErr_NoMemory();
    Ref capsule(PyCapsule_New(state, State::NAME, forget));
    if (!capsule) return delete state, nullptr;
    if (!state->check(tensors)) return PyErr_Clear(), nullptr;
    for (int i = 0; i < BUFFERS; i++) {
        Ref alias(tensors[i] == Py_None ? nullptr : call(tensors[i], torch.detach).release());
        if (!alias && tensors[i] != Py_None) return nullptr;
        if (PyList_Append(aliases.object, alias ? alias.object : Py_None)) return nullptr;
    }
    Ref kept(PyList_AsTuple(aliases.object));
    if (!kept || PyList_Append(owned.object, kept.object) || PyList_Append(owned.object, capsule.object)) return nullptr;
    return PyList_AsTuple(owned.object);
}

// Tell autograd that the buffers [first, end) have changed, and the number of images if `counted`.
inline bool mark_written(PyObject *handle, int first, int end, bool counted = false) {
    Ref written(PyTuple_GetSlice(handle, first, end));
    if (written && counted) {
        Ref images(PyTuple_GetSlice(handle, IMAGES, BUFFERS));
        written = Ref(images ? PySequence_Concat(written.object, images.object) : nullptr);
    }
    return written && Ref(PyObject_CallFunctionObjArgs(torch.increment_version, written.object, nullptr));
}

}  // namespace
