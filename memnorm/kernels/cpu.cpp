// The CPU kernels for Python. Building and loading them needs nothing of torch.
//
// `train`, `forward` and `backward` take tensors and return None if one of them is not as the kernels need it; then
// nothing has been read or written. The interpreter's lock is released while data are read.
#include "state.h"
#include "work.h"

namespace {

// The interpreter's lock is released until the end of the scope.
struct Unlocked {
    PyThreadState *state = PyEval_SaveThread();

    Unlocked() = default;
    Unlocked(const Unlocked &) = delete;
    ~Unlocked() { PyEval_RestoreThread(state); }
};

bool arity(Py_ssize_t given, Py_ssize_t wanted) {
    if (given != wanted) PyErr_Format(PyExc_TypeError, "expected %zd arguments, got %zd", wanted, given);
    return given == wanted;
}

PyObject *none() {
    Py_INCREF(Py_None);
    return Py_None;
}

// The kernels cannot take these tensors. Reading an attribute of an unusual tensor may have raised.
PyObject *refused() { return PyErr_Clear(), none(); }

// Call work<T, S> for the kind of data; without memory, set Python's error.
template <class Work> bool by_kind(int kind, Work work) {
    try {
        if (kind == FLOAT32)
            work(float(), float());
        else if (kind == FLOAT64)
            work(double(), double());
        else
            work(bfloat16(), float());
        return !PyErr_Occurred();
    } catch (const std::exception &) {  // only allocations throw
        PyErr_NoMemory();
        return false;
    }
}

bool among(PyObject *ranks, Py_ssize_t rank) {
    for (Py_ssize_t i = 0; i < PyTuple_Size(ranks); i++)
        if (PyLong_AsSsize_t(PyTuple_GetItem(ranks, i)) == rank) return true;
    return false;
}

// Data of a layer: x of (N, C, …), tensors of its shape, parameters of its channels.
struct Data {
    View x;
    int64_t n = 0, c = 0, l = 0;
    bool planes = false, dense = false;

    explicit Data(PyObject *tensor) : x(View::plain(tensor)) {
        if (x.kind > BFLOAT16 || !x.data || x.rank < 2) return;
        n = x.shape[0], c = x.shape[1], l = x.spatial();
        bool contiguous = x.is_contiguous();
        planes = contiguous && c > 1 && l > 1;
        // Rows of channels for images and volumes only: torch's batch norm copies a series into contiguous memory.
        dense = contiguous || (x.rank > 3 && x.is_rows());
    }
    bool fits() const { return dense && n * c * l > 0; }
    bool wide() const { return x.kind == FLOAT64; }
    int64_t width() const { return wide() ? 8 : 4; }  // of a statistic, in bytes
    int64_t saved_bytes() const { return (6 * c + 1) * width(); }

    // The address of a tensor of x's shape, kind and layout; null for None; `ok` becomes false for another tensor.
    void *matching(PyObject *tensor, bool &ok) const {
        if (tensor == Py_None) return nullptr;
        View other = View::plain(tensor);
        ok = ok && other.kind == x.kind && other.data && other.has_shape_of(x) &&
            (x.is_contiguous() ? other.is_contiguous() : other.has_strides_of(x));
        return ok ? other.data : nullptr;
    }
    // The address of a parameter.
    void *vector(PyObject *parameter, bool &ok) const {
        if (parameter == Py_None) return nullptr;
        View view = View::plain(parameter);
        ok = ok && view.is_vector(wide() ? FLOAT64 : FLOAT32, c) && view.data;
        return ok ? view.data : nullptr;
    }
};

// The arguments that `train` and `forward` share: x, weight, bias, residual, relu, eps, threads.
struct Call {
    static constexpr Py_ssize_t ARGUMENTS = 7;
    Data data;
    bool ok = true, relu;
    void *weight, *bias, *residual, *out = nullptr;
    double eps;
    int64_t threads;
    Ref y{nullptr}, saved{nullptr};

    explicit Call(PyObject *const *args) : data(args[0]) {
        ok = data.fits();
        weight = ok ? data.vector(args[1], ok) : nullptr;
        bias = ok ? data.vector(args[2], ok) : nullptr;
        residual = ok ? data.matching(args[3], ok) : nullptr;
        relu = args[4] == Py_True;
        ok = ok && (relu || !residual);
        eps = PyFloat_AsDouble(args[5]);
        threads = PyLong_AsLongLong(args[6]);
    }
    bool allocate(PyObject *x) {
        y.object = empty_like(x, data.x.bytes(), out);
        saved.object = PyByteArray_FromStringAndSize(nullptr, data.saved_bytes());
        return y && saved;
    }
    template <class T, class S> Forward<T, S> job() const {
        Forward<T, S> job;
        job.n = data.n, job.c = data.c, job.l = data.l;
        job.x = static_cast<const T *>(data.x.data);
        job.weight = static_cast<const S *>(weight);
        job.bias = static_cast<const S *>(bias);
        job.residual = static_cast<const T *>(residual);
        job.relu = relu;
        job.eps = eps;
        job.y = static_cast<T *>(out);
        // What backward reads in addition to x: six vectors and the memory's weight.
        job.saved_mean = reinterpret_cast<S *>(PyByteArray_AsString(saved.object));
        job.saved_var = job.saved_mean + job.c;
        job.hat_mean = job.saved_var + job.c;
        job.hat_inv = job.hat_mean + job.c;
        job.batch_mean = job.hat_inv + job.c;
        job.batch_var = job.batch_mean + job.c;
        return job;
    }
    template <class T, class S> void run_forward(Forward<T, S> &job, double memory_weight) const {
        job.memory_weight = job.batch_var[job.c] = S(memory_weight);
        run(job, data.planes, threads);
    }
};

// Normalise with the memory (mean, var, weight) of the last arguments, which is read only.
PyObject *py_forward(PyObject *, PyObject *const *args, Py_ssize_t given) {
    if (!introduced() || !arity(given, Call::ARGUMENTS + 3)) return nullptr;
    if (!unobserved()) return refused();
    Call call(args);
    PyObject *const *memory = args + Call::ARGUMENTS;
    void *mean = call.ok ? call.data.vector(memory[0], call.ok) : nullptr;
    void *var = call.ok ? call.data.vector(memory[1], call.ok) : nullptr;
    double weight = PyFloat_AsDouble(memory[2]);
    if (!call.ok || !mean || !var || PyErr_Occurred()) return refused();
    if (!call.allocate(args[0])) return nullptr;
    bool run = by_kind(call.data.x.kind, [&](auto t, auto s) {
        auto job = call.job<decltype(t), decltype(s)>();
        using S = decltype(s);
        job.memory_mean = static_cast<const S *>(mean);
        job.memory_var = static_cast<const S *>(var);
        Unlocked unlocked;
        call.run_forward(job, weight);
    });
    return run ? PyTuple_Pack(2, call.y.object, call.saved.object) : nullptr;
}

// Normalise with the memory of a layer's buffers; then make the batch the newest remembered one, if `recording`.
PyObject *py_train(PyObject *, PyObject *const *args, Py_ssize_t given) {
    if (!arity(given, Call::ARGUMENTS + 8)) return nullptr;
    PyObject *const *layer = args + Call::ARGUMENTS;
    PyObject *handle = layer[0], *buffers = layer[1], *ranks = layer[2];
    const State *state = State::of(handle);
    if (!state) return nullptr;
    if (!PyTuple_Check(ranks) || !PyDict_Check(buffers)) return PyErr_Format(PyExc_TypeError, "expected a dictionary and a tuple");
    if (!unobserved() || !runs_once()) return refused();
    Call call(args);
    const Data &data = call.data;
    // An inference tensor cannot be saved for backward: that must fail before anything is recorded.
    for (PyObject *saved : {args[0], args[1]})
        if (saved != Py_None && is_true(::call(saved, torch.is_inference)) && is_true(ask(torch.grad_enabled))) return refused();
    if (!call.ok || data.wide() != state->wide || data.c != state->c || data.n * data.l < 2 || !among(ranks, data.x.rank) ||
        !state->holds(handle, buffers))
        return refused();
    bool recording = layer[3] == Py_True, prior_always = layer[6] == Py_True, evenly = layer[7] == Py_True;
    double decay = PyFloat_AsDouble(layer[4]), prior_weight = PyFloat_AsDouble(layer[5]);
    if (PyErr_Occurred() || !call.allocate(args[0])) return nullptr;
    double strength = *state->at<double>(STRENGTH);
    bool run = by_kind(call.data.x.kind, [&](auto t, auto s) {
        auto job = call.job<decltype(t), decltype(s)>();
        auto memory = state->memory<decltype(s)>();
        memory.decay = decay, memory.prior_weight = prior_weight, memory.prior_always = prior_always, memory.evenly = evenly;
        Unlocked unlocked;
        job.memory_mean = memory.running_mean;
        job.memory_var = memory.running_var;
        call.run_forward(job, evenly ? 0 : strength * memory.weight(job.count()));
        if (recording) record(memory, job.batch_mean, job.batch_var, job.count(), job.n);
    });
    if (!run) return nullptr;
    if (recording && !mark_written(handle, MEAN, state->slots ? BACKWARD_MEAN : SLOT_MEANS, state->at<void>(IMAGES))) return nullptr;
    return PyTuple_Pack(2, call.y.object, call.saved.object);
}

// Make the batch (mean, var, count) the newest remembered one, as `train` does, but count no images. True if it was done.
PyObject *py_record(PyObject *, PyObject *const *args, Py_ssize_t given) {
    if (!introduced() || !arity(given, 8)) return nullptr;
    const State *state = State::of(args[0]);
    if (!state) return nullptr;
    int kind = state->wide ? FLOAT64 : FLOAT32;
    View mean = View::plain(args[1]), var = View::plain(args[2]);
    bool usable = unobserved() && state->holds(args[0], MEAN, BACKWARD_MEAN) && mean.is_vector(kind, state->c) &&
        var.is_vector(kind, state->c) && mean.data && var.data;
    if (!usable) return PyErr_Clear(), PyBool_FromLong(0);
    double count = PyFloat_AsDouble(args[3]), decay = PyFloat_AsDouble(args[4]), prior_weight = PyFloat_AsDouble(args[5]);
    if (PyErr_Occurred()) return nullptr;
    bool run = by_kind(kind, [&](auto, auto s) {
        using S = decltype(s);
        auto memory = state->memory<S>();
        memory.decay = decay, memory.prior_weight = prior_weight;
        memory.prior_always = args[6] == Py_True, memory.evenly = args[7] == Py_True;
        record(memory, static_cast<const S *>(mean.data), static_cast<const S *>(var.data), count, 0);
    });
    if (!run || !mark_written(args[0], MEAN, state->slots ? BACKWARD_MEAN : SLOT_MEANS)) return nullptr;
    return PyBool_FromLong(1);
}

// A tensor for a gradient that is wanted; None for another.
PyObject *gradient_of(PyObject *tensor, int64_t bytes, PyObject *wanted, Py_ssize_t argument, void *&data) {
    if (PyTuple_GetItem(wanted, argument) != Py_True || tensor == Py_None) return none();
    return empty_like(tensor, bytes, data);
}

// The gradients of (x, weight, bias, residual) that `wanted` names, and None for autograd's last argument.
PyObject *py_backward(PyObject *, PyObject *const *args, Py_ssize_t given) {
    if (!introduced() || !arity(given, 10)) return nullptr;
    PyObject *saved = args[0], *x = args[3], *weight = args[4], *wanted = args[5], *handle = args[7];
    int64_t threads = PyLong_AsLongLong(args[6]);
    bool reading = args[8] == Py_True, recording = args[9] == Py_True, remembers = handle != Py_None, ok = true;
    if (PyErr_Occurred() || !PyTuple_Check(wanted) || PyTuple_Size(wanted) < 4) return PyErr_Format(PyExc_TypeError, "unexpected arguments");
    if (is_true(ask(torch.grad_enabled)) || !unobserved()) return refused();
    Data data(x);
    if (!data.fits() || !PyByteArray_Check(saved) || PyByteArray_Size(saved) != data.saved_bytes()) return refused();
    void *g = data.matching(args[1], ok), *y = ok ? data.matching(args[2], ok) : nullptr;
    void *gain = ok ? data.vector(weight, ok) : nullptr;
    const State *state = remembers ? State::of(handle) : nullptr;
    if (!ok || !g || (remembers && (!state || state->wide != data.wide() || state->c != data.c || !state->at<void>(BACKWARD_MEAN) ||
        !state->holds(handle, BACKWARD_MEAN, IMAGES) || !state->holds(handle, STRENGTH, STRENGTH + 1))))
        return refused();
    if (weight == Py_None && PyTuple_GetItem(wanted, 2) == Py_True) return refused();  // a bias alone
    // Not in a tuple yet: another thread could take hold of it through the garbage collector while it is filled.
    Ref results[4] = {Ref(nullptr), Ref(nullptr), Ref(nullptr), Ref(nullptr)};
    void *gradients[4] = {};
    for (Py_ssize_t i = 0; i < 4; i++) {
        bool of_data = i == 0 || i == 3;
        int64_t bytes = of_data ? data.x.bytes() : data.c * data.width();
        results[i] = Ref(gradient_of(of_data ? x : weight, bytes, wanted, i, gradients[i]));
        if (!results[i]) return nullptr;
    }
    bool run = by_kind(data.x.kind, [&](auto t, auto s) {
        using T = decltype(t);
        using S = decltype(s);
        Backward<T, S> job;
        job.n = data.n, job.c = data.c, job.l = data.l;
        job.g = static_cast<const T *>(g);
        job.y = static_cast<const T *>(y);
        job.x = static_cast<const T *>(data.x.data);
        job.weight = static_cast<const S *>(gain);
        job.dx = static_cast<T *>(gradients[0]);
        job.grad_weight = static_cast<S *>(gradients[1]);
        job.grad_bias = static_cast<S *>(gradients[2]);
        job.d_residual = static_cast<T *>(gradients[3]);
        std::vector<S> scratch(std::size_t(5 * job.c));
        job.scale = scratch.data();
        job.slope = job.scale + job.c;
        job.offset = job.slope + job.c;
        if (!job.grad_weight) job.grad_weight = job.offset + job.c;
        if (!job.grad_bias) job.grad_bias = job.offset + 2 * job.c;
        const S *numbers = reinterpret_cast<const S *>(PyByteArray_AsString(saved));
        job.hat_mean = numbers + 2 * job.c;
        job.hat_inv = numbers + 3 * job.c;
        job.memory_weight = numbers[6 * job.c];
        Unlocked unlocked;
        if (!remembers) return ::run(job, data.planes, threads);
        auto memory = state->backward_memory<S>(reading, recording);
        job.past_mean = memory.mean;
        job.past_product = memory.product;
        job.memory_weight = memory.read_weight();
        ::run(job, data.planes, threads);
        if (recording) record_backward(memory, job.c, job.grad_bias, job.grad_weight, job.count());
    });
    if (!run) return nullptr;
    if (remembers && recording && !mark_written(handle, BACKWARD_MEAN, IMAGES)) return nullptr;
    return PyTuple_Pack(5, results[0].object, results[1].object, results[2].object, results[3].object, Py_None);
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

// Centre the gradient of a weight in place; call otherwise(weight) if the gradient is not as the kernels need it.
PyObject *py_center(PyObject *, PyObject *const *args, Py_ssize_t given) {
    if (!introduced() || !arity(given, 2)) return nullptr;
    PyObject *otherwise = args[0], *weight = args[1];
    Ref gradient = attribute(weight, torch.grad);
    if (!gradient) return nullptr;
    Data data(gradient.object);
    bool usual = data.fits() && data.x.kind != BFLOAT16 && !is_true(attribute(gradient.object, torch.requires_grad));
    if (!usual) {
        PyErr_Clear();
        return PyObject_CallFunctionObjArgs(otherwise, weight, nullptr);
    }
    if (data.wide())
        center(data.n, data.c * data.l, static_cast<double *>(data.x.data));
    else
        center(data.n, data.c * data.l, static_cast<float *>(data.x.data));
    Ref written(PyTuple_Pack(1, gradient.object));
    if (!written || !Ref(PyObject_CallFunctionObjArgs(torch.increment_version, written.object, nullptr))) return nullptr;
    return none();
}

// The default decay of an update on so many images; `decay_by_images` in updates.py is the same in torch operations.
double decay_by_images(int64_t images) { return std::fmax(0.5, 1 - 0.25 * std::sqrt(double(images) / 32)); }

// For each (handle, buffers, factor) of a list: multiply the weights of both memories by the factor (None: the default
// decay), and begin to count images anew. False, with nothing written, if a handle is None or does not hold.
PyObject *py_fade(PyObject *, PyObject *const *args, Py_ssize_t given) {
    if (!introduced() || !arity(given, 1)) return nullptr;
    if (!PyList_Check(args[0])) return PyErr_Format(PyExc_TypeError, "expected a list");
    Py_ssize_t count = PyList_Size(args[0]);
    Ref written(PyList_New(0));
    for (bool writing : {false, true}) {
        for (Py_ssize_t i = 0; i < count; i++) {
            PyObject *handle, *buffers, *given_factor;
            if (!PyArg_ParseTuple(PyList_GetItem(args[0], i), "OO!O", &handle, &PyDict_Type, &buffers, &given_factor)) return nullptr;
            if (handle == Py_None) return PyBool_FromLong(0);
            const State *state = State::of(handle);
            if (!state) return nullptr;
            if (!writing) {
                for (int which : {WEIGHT, BACKWARD_WEIGHT, IMAGES}) {
                    if (!state->at<void>(which) || !state->holds(handle, buffers, which)) return PyErr_Clear(), PyBool_FromLong(0);
                    if (!written || PyList_Append(written.object, PyTuple_GetItem(handle, which))) return nullptr;
                }
                if (given_factor != Py_None && (PyFloat_AsDouble(given_factor), PyErr_Occurred())) return nullptr;
                continue;
            }
            int64_t &images = *state->at<int64_t>(IMAGES);
            double factor = given_factor == Py_None ? decay_by_images(images) : PyFloat_AsDouble(given_factor);
            for (int which : {WEIGHT, BACKWARD_WEIGHT}) {
                if (state->wide)
                    *state->at<double>(which) *= factor;
                else
                    *state->at<float>(which) = float(double(*state->at<float>(which)) * factor);
            }
            images = 0;
        }
    }
    if (!Ref(PyObject_CallFunctionObjArgs(torch.increment_version, written.object, nullptr))) return nullptr;
    return PyBool_FromLong(1);
}

PyObject *py_check(PyObject *, PyObject *const *args, Py_ssize_t given) {
    if (!introduced() || !arity(given, 1)) return nullptr;
    if (!PyDict_Check(args[0])) return PyErr_Format(PyExc_TypeError, "expected a dictionary");
    PyObject *handle = make_handle(args[0]);
    return handle || PyErr_Occurred() ? handle : none();
}

PyObject *py_introduce(PyObject *, PyObject *const *args, Py_ssize_t given) {
    if (!arity(given, INTRODUCED) || !introduce(args)) return nullptr;
    return none();
}

PyCFunction method(PyObject *(*function)(PyObject *, PyObject *const *, Py_ssize_t)) {
    return reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(function));
}

PyMethodDef methods[] = {
    {"introduce", method(py_introduce), METH_FASTCALL, "The objects of torch that the rest needs; call it first, once."},
    {"check", method(py_check), METH_FASTCALL, "check(buffers): the handle of a layer's buffers, or None"},
    {"train", method(py_train), METH_FASTCALL,
        "train(x, weight, bias, residual, relu, eps, threads, handle, buffers, ranks, recording, decay, prior_weight, "
        "prior_always, evenly): (y, saved), or None"},
    {"forward", method(py_forward), METH_FASTCALL,
        "forward(x, weight, bias, residual, relu, eps, threads, mean, var, memory_weight): (y, saved), or None"},
    {"record", method(py_record), METH_FASTCALL,
        "record(handle, mean, var, count, decay, prior_weight, prior_always, evenly): True if it was done"},
    {"backward", method(py_backward), METH_FASTCALL,
        "backward(saved, g, y, x, weight, wanted, threads, handle, reading, recording): gradients, or None"},
    {"fade", method(py_fade), METH_FASTCALL, "fade([(handle, buffers, factor or None), …]): True if it was done"},
    {"center", method(py_center), METH_FASTCALL, "center(otherwise, weight)"},
    {nullptr, nullptr, 0, nullptr}};

PyModuleDef module = {PyModuleDef_HEAD_INIT, "memnorm.kernels._cpu", "CPU kernels.", -1, methods, nullptr, nullptr, nullptr, nullptr};

}  // namespace

PyMODINIT_FUNC PyInit__cpu() { return PyModule_Create(&module); }
