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

bool suspended = false;  // what layers remember of backward belongs to a scaled loss at the moment

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
    int64_t saved_bytes() const { return (6 * c + 2) * width(); }

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

// The threads to use; torch is asked only if the data are worth a second one.
int64_t threads_for(const Data &data) {
    if (data.n * data.c * data.l < ALONE) return 1;
    Ref threads = ask(torch.get_num_threads);
    int64_t found = threads ? PyLong_AsLongLong(threads.object) : 1;
    return PyErr_Clear(), found;
}

// A forward: x, weight, bias and residual as the kernels read them, and what it makes of them.
struct Call {
    Data data;
    bool ok, relu;
    void *weight, *bias, *residual, *out = nullptr;
    double eps;
    Ref y{nullptr}, saved{nullptr};

    Call(PyObject *const *tensors, bool relu, double eps) : data(tensors[0]), ok(data.fits()), relu(relu), eps(eps) {
        weight = ok ? data.vector(tensors[1], ok) : nullptr;
        bias = ok ? data.vector(tensors[2], ok) : nullptr;
        residual = ok ? data.matching(tensors[3], ok) : nullptr;
        ok = ok && (relu || !residual);
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
        // What backward reads in addition to x: six vectors, the memory's weight, and 1 once it was recorded.
        job.saved_mean = reinterpret_cast<S *>(PyByteArray_AsString(saved.object));
        job.saved_var = job.saved_mean + job.c;
        job.hat_mean = job.saved_var + job.c;
        job.hat_inv = job.hat_mean + job.c;
        job.batch_mean = job.hat_inv + job.c;
        job.batch_var = job.batch_mean + job.c;
        job.batch_var[job.c + 1] = 0;
        return job;
    }
    template <class T, class S> void run_forward(Forward<T, S> &job, double memory_weight, int64_t threads) const {
        job.memory_weight = job.batch_var[job.c] = S(memory_weight);
        run(job, data.planes, threads);
    }
    // (y, call): the output and what its backward gets, (saved, relu, eps, layer, handle, reading). The last three are
    // for a layer with a backward memory; a layer without one is None.
    PyObject *with(PyObject *layer, PyObject *handle, bool reading) const {
        Ref number(PyFloat_FromDouble(eps));
        PyObject *flags[] = {Py_False, Py_True};
        Ref rest(number ? PyTuple_Pack(6, saved.object, flags[relu], number.object, layer, handle, flags[reading]) : nullptr);
        return rest ? PyTuple_Pack(2, y.object, rest.object) : nullptr;
    }
};

// forward(x, weight, bias, residual, relu, eps, mean, var, memory_weight): normalise with a memory that is read only.
PyObject *py_forward(PyObject *, PyObject *const *args, Py_ssize_t given) {
    if (!introduced() || !arity(given, 9)) return nullptr;
    if (!unobserved()) return refused();
    Call call(args, args[4] == Py_True, PyFloat_AsDouble(args[5]));
    void *mean = call.ok ? call.data.vector(args[6], call.ok) : nullptr;
    void *var = call.ok ? call.data.vector(args[7], call.ok) : nullptr;
    double weight = PyFloat_AsDouble(args[8]);
    if (!call.ok || !mean || !var || PyErr_Occurred()) return refused();
    if (!call.allocate(args[0])) return nullptr;
    int64_t threads = threads_for(call.data);
    bool run = by_kind(call.data.x.kind, [&](auto t, auto s) {
        auto job = call.job<decltype(t), decltype(s)>();
        using S = decltype(s);
        job.memory_mean = static_cast<const S *>(mean);
        job.memory_var = static_cast<const S *>(var);
        Unlocked unlocked;
        call.run_forward(job, weight, threads);
    });
    return run ? call.with(Py_None, Py_None, false) : nullptr;
}

// Normalise x by its own moments and the memory in the layer's buffers; then make the batch the newest remembered one,
// if the layer records. `tensors` are x, weight, bias, residual.
PyObject *train(const LayerFields &layer, PyObject *const *tensors, PyObject *ranks, bool relu) {
    PyObject *handle = layer.get(CHECKED);
    if (handle == Py_None || !layer.trains_alone() || !unobserved() || !runs_once()) return refused();
    Py_INCREF(handle);
    Ref owned(handle);  // another thread may replace it while the lock is released
    const State *state = State::of(handle);
    if (!state) return nullptr;
    Call call(tensors, relu, layer.number(EPS));
    const Data &data = call.data;
    // An inference tensor cannot be saved for backward: that must fail before anything is recorded.
    for (PyObject *saved : {tensors[0], tensors[1]})
        if (saved != Py_None && is_true(::call(saved, torch.is_inference)) && is_true(ask(torch.grad_enabled))) return refused();
    if (!call.ok || !(call.eps > 0) || data.wide() != state->wide || data.c != state->c || data.n * data.l < 2 ||
        !among(ranks, data.x.rank) || !state->holds(handle, layer.get(LAYER_BUFFERS)))
        return refused();
    bool two_way = state->at<void>(BACKWARD_MEAN), recording = layer.records(), evenly = layer.get(MOMENTUM) == Py_None;
    bool prior_always = !evenly && layer.get(PRIOR_FROM_INIT) == Py_True;
    double decay = two_way ? 1 : layer.number(DECAY), prior_weight = layer.number(PRIOR_WEIGHT);
    if (PyErr_Occurred()) return nullptr;
    if (two_way && suspended) return refused();
    if (!call.allocate(tensors[0])) return nullptr;
    double strength = *state->at<double>(STRENGTH);
    int64_t threads = threads_for(data);
    bool run = by_kind(data.x.kind, [&](auto t, auto s) {
        auto job = call.job<decltype(t), decltype(s)>();
        auto memory = state->memory<decltype(s)>();
        memory.decay = decay, memory.prior_weight = prior_weight, memory.prior_always = prior_always, memory.evenly = evenly;
        Unlocked unlocked;
        job.memory_mean = memory.running_mean;
        job.memory_var = memory.running_var;
        call.run_forward(job, evenly ? 0 : strength * memory.weight(job.count()), threads);
        if (recording) record(memory, job.batch_mean, job.batch_var, job.count(), job.n);
    });
    if (!run) return nullptr;
    if (recording && !mark_written(handle, MEAN, state->slots ? BACKWARD_MEAN : SLOT_MEANS, state->at<void>(IMAGES))) return nullptr;
    return two_way ? call.with(layer.layer, handle, !evenly) : call.with(Py_None, Py_None, false);
}

// The output of a pair (y, call).
PyObject *output_of(PyObject *made) {
    PyObject *y = PyTuple_GetItem(made, 0);
    Py_INCREF(y);
    return y;
}

// train(with_gradient, layer, ranks, x, activation, residual): the output of a layer in training, differentiable; or None.
PyObject *py_train(PyObject *, PyObject *const *args, Py_ssize_t given) {
    if (!introduced() || !arity(given, 6)) return nullptr;
    PyObject *with_gradient = args[0], *ranks = args[2], *x = args[3], *activation = args[4], *residual = args[5];
    LayerFields layer(args[1]);
    if (!layer || !PyTuple_Check(ranks)) return PyErr_Format(PyExc_TypeError, "expected a layer and a tuple");
    bool relu = activation != Py_None;
    if (relu && !(PyUnicode_Check(activation) && !PyUnicode_CompareWithASCIIString(activation, "relu"))) return refused();
    Ref weight = layer.parameter(WEIGHT_NAME), bias = layer.parameter(BIAS_NAME);
    if (!weight || !bias) return refused();
    PyObject *tensors[] = {x, weight.object, bias.object, residual};
    Ref made(train(layer, tensors, ranks, relu));
    if (!made || made.object == Py_None) return made.release();
    if (!is_true(ask(torch.grad_enabled))) return output_of(made.object);
    return PyObject_CallFunctionObjArgs(with_gradient, x, weight.object, bias.object, residual, made.object, nullptr);
}

// train_prepared(layer, ranks, x, weight, bias, residual, relu): the same for copies of the tensors; (y, call), or None.
PyObject *py_train_prepared(PyObject *, PyObject *const *args, Py_ssize_t given) {
    if (!introduced() || !arity(given, 7)) return nullptr;
    LayerFields layer(args[0]);
    if (!layer || !PyTuple_Check(args[1])) return PyErr_Format(PyExc_TypeError, "expected a layer and a tuple");
    return train(layer, args + 2, args[1], args[6] == Py_True);
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

// backward(call, wanted, g, y, x, weight): the gradients of (x, weight, bias, residual) that `wanted` names, and None for
// autograd's last argument; None if the kernels cannot make them. `call` is what the forward returned.
PyObject *py_backward(PyObject *, PyObject *const *args, Py_ssize_t given) {
    if (!introduced() || !arity(given, 6)) return nullptr;
    PyObject *call = args[0], *wanted = args[1], *x = args[4], *weight = args[5];
    if (!PyTuple_Check(call) || PyTuple_Size(call) != 6 || !PyTuple_Check(wanted) || PyTuple_Size(wanted) < 4)
        return PyErr_Format(PyExc_TypeError, "unexpected arguments");
    PyObject *saved = PyTuple_GetItem(call, 0), *owner = PyTuple_GetItem(call, 3), *handle = PyTuple_GetItem(call, 4);
    bool remembers = owner != Py_None, wants[4];
    for (int i = 0; i < 4; i++) wants[i] = PyTuple_GetItem(wanted, i) == Py_True;
    if (!(wants[0] || wants[1] || wants[2])) return refused();  // the residual's gradient does not pass the norm
    if (is_true(ask(torch.grad_enabled)) || !unobserved()) return refused();
    LayerFields layer(remembers ? owner : nullptr);
    Data data(x);
    if (!data.fits() || !PyByteArray_Check(saved) || PyByteArray_Size(saved) != data.saved_bytes()) return refused();
    bool ok = true;
    void *g = data.matching(args[2], ok), *y = ok ? data.matching(args[3], ok) : nullptr;
    void *gain = ok ? data.vector(weight, ok) : nullptr;
    const State *state = remembers ? State::of(handle) : nullptr;
    if (!ok || !g || (remembers && (!layer || !state || state->wide != data.wide() || state->c != data.c ||
        !state->at<void>(BACKWARD_MEAN) || !state->holds(handle, BACKWARD_MEAN, IMAGES) ||
        !state->holds(handle, STRENGTH, STRENGTH + 1) || layer.get(OUTGOING_BACKWARD) != Py_None)))
        return refused();
    if (weight == Py_None && wants[2]) return refused();  // a bias alone
    // Not in a tuple yet: another thread could take hold of it through the garbage collector while it is filled.
    Ref results[4] = {Ref(nullptr), Ref(nullptr), Ref(nullptr), Ref(nullptr)};
    void *gradients[4] = {};
    for (Py_ssize_t i = 0; i < 4; i++) {
        bool of_data = i == 0 || i == 3;
        PyObject *like = of_data ? x : weight;
        int64_t bytes = of_data ? data.x.bytes() : data.c * data.width();
        results[i] = Ref(wants[i] && like != Py_None ? empty_like(like, bytes, gradients[i]) : none());
        if (!results[i]) return nullptr;
    }
    bool reading = PyTuple_GetItem(call, 5) == Py_True, recording = remembers && layer.records(), recorded = false;
    int64_t threads = threads_for(data);
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
        S *numbers = reinterpret_cast<S *>(PyByteArray_AsString(saved));
        job.hat_mean = numbers + 2 * job.c;
        job.hat_inv = numbers + 3 * job.c;
        job.memory_weight = numbers[6 * job.c];
        Unlocked unlocked;
        if (!remembers) return ::run(job, data.planes, threads);
        auto memory = state->backward_memory<S>(reading);
        job.past_mean = memory.mean;
        job.past_product = memory.product;
        job.memory_weight = memory.read_weight();
        ::run(job, data.planes, threads);
        S &done = numbers[6 * job.c + 1];
        if (recording && done == 0)
            done = 1, recorded = record_backward(memory, job.c, job.grad_bias, job.grad_weight, job.count());
    });
    if (!run || (recorded && !mark_written(handle, BACKWARD_MEAN, IMAGES))) return nullptr;
    if (recorded && layer.get(HAS_OPTIMIZER) != Py_True && state->holds(handle, layer.get(LAYER_BUFFERS), BACKWARD_WEIGHT) &&
        !Ref(PyObject_CallMethodObjArgs(owner, torch.count_backward, nullptr)))
        return nullptr;
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

PyObject *py_suspend(PyObject *, PyObject *const *args, Py_ssize_t given) {
    if (!arity(given, 1)) return nullptr;
    suspended = args[0] == Py_True;
    return none();
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
    {"train", method(py_train), METH_FASTCALL, "train(with_gradient, layer, ranks, x, activation, residual): the output, or None"},
    {"train_prepared", method(py_train_prepared), METH_FASTCALL,
        "train_prepared(layer, ranks, x, weight, bias, residual, relu): (y, call), or None"},
    {"suspend", method(py_suspend), METH_FASTCALL, "suspend(on): make `train` refuse layers with a backward memory"},
    {"forward", method(py_forward), METH_FASTCALL,
        "forward(x, weight, bias, residual, relu, eps, mean, var, memory_weight): (y, call), or None"},
    {"record", method(py_record), METH_FASTCALL,
        "record(handle, mean, var, count, decay, prior_weight, prior_always, evenly): True if it was done"},
    {"backward", method(py_backward), METH_FASTCALL, "backward(call, wanted, g, y, x, weight): gradients, or None"},
    {"fade", method(py_fade), METH_FASTCALL, "fade([(handle, buffers, factor or None), …]): True if it was done"},
    {"center", method(py_center), METH_FASTCALL, "center(otherwise, weight)"},
    {nullptr, nullptr, 0, nullptr}};

PyModuleDef module = {PyModuleDef_HEAD_INIT, "memnorm.kernels._cpu", "CPU kernels.", -1, methods, nullptr, nullptr, nullptr, nullptr};

}  // namespace

PyMODINIT_FUNC PyInit__cpu() { return PyModule_Create(&module); }
