// What every call from Python does: read its arguments, release the lock, run a job, report what went wrong.
#pragma once

#include "tensors.h"

#include <exception>
#include <new>

#include "record.h"
#include "work.h"

namespace {

enum Kind { FLOAT32, FLOAT64, BFLOAT16 };

// Arguments, one after the other. A wrong type sets Python's error, which is looked at once, at the end.
struct Arguments {
    PyObject *const *next;

    int64_t integer() { return PyLong_AsLongLong(*next++); }
    double number() { return PyFloat_AsDouble(*next++); }
    template <class P> P *address() { return static_cast<P *>(PyLong_AsVoidPtr(*next++)); }
    template <class P> P *bytes() {
        PyObject *object = *next++;
        if (PyByteArray_Check(object)) return reinterpret_cast<P *>(PyByteArray_AsString(object));
        PyErr_SetString(PyExc_TypeError, "expected a bytearray");
        return nullptr;
    }
};

// Without the lock of the interpreter until the scope is left, be it by an exception.
struct Unlocked {
    PyThreadState *state = PyEval_SaveThread();

    Unlocked() = default;
    Unlocked(const Unlocked &) = delete;
    ~Unlocked() { PyEval_RestoreThread(state); }
};

// What backward needs besides its input: six vectors, and the memory's weight.
template <class T, class S> void write_to(Forward<T, S> &job, S *saved) {
    job.saved_mean = saved;
    job.saved_var = job.saved_mean + job.c;
    job.hat_mean = job.saved_var + job.c;
    job.hat_inv = job.hat_mean + job.c;
    job.batch_mean = job.hat_inv + job.c;
    job.batch_var = job.batch_mean + job.c;
}

template <class T, class S> void run_forward(Forward<T, S> &job, double memory_weight, bool planes, int64_t threads) {
    job.memory_weight = job.batch_var[job.c] = S(memory_weight);
    run(job, planes, threads);
}

// A forward that reads a layer's memory, and then writes it if `recording`.
template <class T, class S>
void run_train(Forward<T, S> &job, Memory<S> &memory, double strength, bool recording, bool planes, int64_t threads) {
    memory.c = job.c;
    job.memory_mean = memory.running_mean;
    job.memory_var = memory.running_var;
    run_forward(job, memory.evenly ? 0 : strength * memory.weight(job.count()), planes, threads);
    if (recording) record(memory, job.batch_mean, job.batch_var, job.count());
}

template <class S> BackwardMemory<S> read_backward_memory(Arguments &in) {
    BackwardMemory<S> memory;
    memory.mean = in.address<S>();
    memory.product = in.address<S>();
    memory.weight = in.address<S>();
    memory.strength = in.address<double>();
    memory.recording = in.integer() != 0;
    return memory;
}

template <class T, class S>
void run_backward(Backward<T, S> &job, const S *saved, const BackwardMemory<S> &memory, bool planes, int64_t threads) {
    job.hat_mean = saved + 2 * job.c;
    job.hat_inv = saved + 3 * job.c;
    job.past_mean = memory.mean;
    job.past_product = memory.product;
    job.memory_weight = memory.mean ? memory.read_weight() : saved[6 * job.c];
    std::vector<S> line(std::size_t(3 * job.c));
    job.scale = line.data();
    job.slope = job.scale + job.c;
    job.offset = job.slope + job.c;
    run(job, planes, threads);
    if (memory.mean && memory.recording) record_backward(memory, job.c, job.grad_bias, job.grad_weight, job.count());
}

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

}  // namespace
