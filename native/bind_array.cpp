#include "bind_array.hpp"

#include <nanobind/ndarray.h>

#include <cstring>

#include "core/kernels/dtype.hpp"

namespace nb = nanobind;

namespace potluck::bind {

namespace {

static_assert(sizeof(Py_ssize_t) == sizeof(std::int64_t));

int code(Dtype dtype) { return static_cast<int>(dtype); }

// The dtype code of a format of the buffer protocol (Python's struct module; Zf and Zd are
// NumPy's); 0: none of ours.
int dtype_of(const char* format, Py_ssize_t size) {
    if (format == nullptr || format[0] == '\0') return 0;
    const auto is = [&](const char* text) { return std::strcmp(format, text) == 0; };
    if (format[0] == 'Z') {
        if (is("Zf")) return code(Dtype::complex64);
        return is("Zd") ? code(Dtype::complex128) : 0;
    }
    if (format[1] != '\0') return 0;
    switch (format[0]) {
        case 'e': return code(Dtype::float16);
        case 'f': return code(Dtype::float32);
        case 'd': return code(Dtype::float64);
        case 'b': return code(Dtype::int8);
        case 'B': return code(Dtype::uint8);
        case '?': return code(Dtype::boolean);
        case 'h': return code(Dtype::int16);
        case 'H': return code(Dtype::uint16);
        case 'i': case 'l': case 'q': return code(size == 8 ? Dtype::int64 : Dtype::int32);
        case 'I': case 'L': case 'Q': return code(size == 8 ? Dtype::uint64 : Dtype::uint32);
        default: return 0;
    }
}

// The dtype code of a DLPack dtype; 0: none of ours. Complex tensors are left out, because they may
// be lazy views that are conjugated when they are read.
int dtype_of(const nb::dlpack::dtype& type) {
    using Kind = nb::dlpack::dtype_code;
    constexpr Dtype NONE{};
    const auto of_bits = [&](Dtype of8, Dtype of16, Dtype of32, Dtype of64) {
        switch (type.bits) {
            case 8: return code(of8);
            case 16: return code(of16);
            case 32: return code(of32);
            case 64: return code(of64);
            default: return 0;
        }
    };
    if (type.lanes != 1) return 0;
    switch (static_cast<Kind>(type.code)) {
        case Kind::Int: return of_bits(Dtype::int8, Dtype::int16, Dtype::int32, Dtype::int64);
        case Kind::UInt: return of_bits(Dtype::uint8, Dtype::uint16, Dtype::uint32, Dtype::uint64);
        case Kind::Float: return of_bits(NONE, Dtype::float16, Dtype::float32, Dtype::float64);
        case Kind::Bfloat: return of_bits(NONE, Dtype::bfloat16, NONE, NONE);
        case Kind::Bool: return of_bits(Dtype::boolean, NONE, NONE, NONE);
        default: return 0;
    }
}

// The start of DLPack's table of functions (the struct DLPackExchangeAPI of its version 1).
struct ExchangeTable {
    std::uint32_t major, minor;
    ExchangeTable* previous;
    void* allocate;
    void* to_managed;
    void* from_managed;
    // Describes the tensor without owning it; -1 and an exception if it can't.
    int (*describe)(void* object, nb::dlpack::dltensor* out);
};

// torch's types and functions, found once a script has imported torch; this file never imports it.
// The references are never released, as torch can't be unloaded.
struct Torch {
    PyTypeObject* tensor = nullptr;
    PyTypeObject* parameter = nullptr;
    PyObject* is_neg = nullptr;
    decltype(ExchangeTable::describe) describe = nullptr;  // null: torch is too old for this

    bool find() {
        nb::object module = nb::steal(PyImport_GetModule(nb::str("torch").ptr()));
        if (!module.is_valid()) return false;
        nb::object type = nb::getattr(module, "Tensor", nb::none());
        nb::object nn = nb::getattr(module, "nn", nb::none());
        nb::object derived = nb::getattr(nn, "Parameter", nb::none());
        if (!PyType_Check(type.ptr()) || !PyType_Check(derived.ptr())) return false;
        tensor = reinterpret_cast<PyTypeObject*>(type.release().ptr());
        parameter = reinterpret_cast<PyTypeObject*>(derived.release().ptr());
        is_neg = PyUnicode_InternFromString("is_neg");
        nb::object capsule = nb::getattr(reinterpret_cast<PyObject*>(tensor),
                                         "__dlpack_c_exchange_api__", nb::none());
        if (!PyCapsule_IsValid(capsule.ptr(), "dlpack_exchange_api")) return true;
        auto* table = static_cast<ExchangeTable*>(
            PyCapsule_GetPointer(capsule.ptr(), "dlpack_exchange_api"));
        while (table != nullptr && table->major > 1) table = table->previous;
        if (table != nullptr && table->major == 1) describe = table->describe;
        return true;
    }
};

const Torch* torch() {
    static Torch known;
    if (known.tensor == nullptr && !known.find()) return nullptr;
    return known.describe == nullptr ? nullptr : &known;
}

// False, without the Python exception that led to it.
bool refused() {
    PyErr_Clear();
    return false;
}

}  // namespace

bool Array::describe(nb::handle object, bool writable) {
    static PyTypeObject* const numpy =
        reinterpret_cast<PyTypeObject*>(nb::module_::import_("numpy").attr("ndarray").ptr());
    if (Py_TYPE(object.ptr()) == numpy) return describe_numpy(object, writable);
    return describe_tensor(object);
}

bool Array::describe_numpy(nb::handle object, bool writable) {
    const int flags = PyBUF_C_CONTIGUOUS | PyBUF_FORMAT | (writable ? PyBUF_WRITABLE : 0);
    if (PyObject_GetBuffer(object.ptr(), &view_, flags) != 0) {
        view_.obj = nullptr;
        return refused();
    }
    dtype_ = dtype_of(view_.format, view_.itemsize);
    if (dtype_ == 0) return false;
    data_ = static_cast<char*>(view_.buf);
    dims_ = reinterpret_cast<const std::int64_t*>(view_.shape);
    ndim_ = view_.ndim;
    bytes_ = static_cast<std::size_t>(view_.len);
    count_ = bytes_ / static_cast<std::size_t>(view_.itemsize);
    return true;
}

bool Array::describe_tensor(nb::handle object) {
    const Torch* known = torch();
    if (known == nullptr) return false;
    const PyTypeObject* type = Py_TYPE(object.ptr());
    if (type != known->tensor && type != known->parameter) return false;
    nb::dlpack::dltensor told;
    if (known->describe(object.ptr(), &told) != 0) return refused();
    dtype_ = dtype_of(told.dtype);
    if (dtype_ == 0 || told.device.device_type != nb::device::cpu::value) return false;
    std::int64_t stride = 1;
    for (int i = told.ndim - 1; i >= 0; --i) {
        if (told.shape[i] == 0) stride = 0;
        if (stride != 0 && told.shape[i] != 1 && told.strides != nullptr &&
            told.strides[i] != stride) {
            return false;
        }
        stride *= told.shape[i];
    }
    count_ = static_cast<std::size_t>(stride);
    // The memory of a lazy view of -x holds x: torch negates when it reads.
    PyObject* const arguments[] = {object.ptr()};
    const nb::object negated =
        nb::steal(PyObject_VectorcallMethod(known->is_neg, arguments, 1, nullptr));
    if (!negated.is_valid()) return refused();
    if (negated.ptr() != Py_False) return false;
    data_ = static_cast<char*>(told.data) + told.byte_offset;
    if (told.data == nullptr && count_ != 0) return false;
    dims_ = told.shape;
    ndim_ = told.ndim;
    bytes_ = count_ * item_bytes(static_cast<Dtype>(dtype_));
    return true;
}

}  // namespace potluck::bind
