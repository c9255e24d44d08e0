// Python binding of the kernels: reduction, codecs, and the check of payloads, as functions over
// buffers. All sizes and codes are checked here; the core trusts them.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <optional>
#include <vector>

#include "bind.hpp"
#include "bind_buffer.hpp"
#include "bind_reduction.hpp"
#include "core/kernels/codec.hpp"
#include "core/kernels/kernels.hpp"
#include "core/kernels/reduce.hpp"
#include "core/kernels/select.hpp"
#include "core/wire/msgpack_values.hpp"

namespace nb = nanobind;

namespace potluck::bind {

namespace {

Dtype dtype_of(int code) {
    if (code < 1 || code >= num_dtypes) throw nb::value_error("no such element type");
    return static_cast<Dtype>(code);
}

Codec codec_of(int code) {
    if (code < 1 || code >= num_codecs) throw nb::value_error("no such codec");
    return static_cast<Codec>(code);
}

void require(bool holds, const char* what) {
    if (!holds) throw nb::value_error(what);
}

void combine_buffers(int dtype_code, nb::handle op_name, nb::handle target, nb::handle source) {
    const Dtype dtype = dtype_of(dtype_code);
    const Op op = reduction_named(op_name).op;
    require(has_combine(dtype, op), "this operation has no meaning for this element type");
    const Buffer to(target, true), from(source, false);
    require(to.size() == from.size(), "the buffers must be of one size");
    without_lock(to.size(), [&] {
        combine(dtype, op, to.data(), from.data(), to.size() / item_bytes(dtype));
    });
}

void combine_many_buffers(int dtype_code, nb::handle op_name, nb::handle target,
                          nb::sequence sources) {
    const Dtype dtype = dtype_of(dtype_code);
    const Op op = reduction_named(op_name).op;
    require(has_combine(dtype, op), "this operation has no meaning for this element type");
    const Buffer to(target, true);
    std::vector<Buffer> held;
    std::vector<const void*> from;
    for (nb::handle source : sources) {
        held.emplace_back(source, false);
        require(held.back().size() == to.size(), "the buffers must be of one size");
        from.push_back(held.back().data());
    }
    require(!from.empty(), "at least one source is needed");
    without_lock(to.size() * from.size(), [&] {
        combine_many(dtype, op, to.data(), from.data(), from.size(), to.size() / item_bytes(dtype));
    });
}

void divide_buffer(int dtype_code, nb::handle array, double divisor) {
    const Dtype dtype = dtype_of(dtype_code);
    require(has_divide(dtype), "only floats and complex numbers can be divided");
    const Buffer values(array, true);
    without_lock(values.size(), [&] {
        divide(dtype, values.data(), values.data(), values.size() / item_bytes(dtype), divisor);
    });
}

void check_sizes(Codec codec, const Buffer& encoded, const Buffer& floats) {
    require(floats.size() % 4 == 0 && encoded.size() == encoded_bytes(codec, floats.size() / 4),
            "the encoded buffer is not of the size that so many elements take");
}

std::size_t encode_buffer(int code, nb::handle encoded, nb::handle source) {
    const Codec codec = codec_of(code);
    const Buffer to(encoded, true), from(source, false);
    check_sizes(codec, to, from);
    std::size_t num_beyond = 0;
    without_lock(from.size(),
                 [&] { num_beyond = encode(codec, to.data(), from.data(), from.size() / 4); });
    return num_beyond;
}

std::size_t encode_with_residual_buffer(int code, nb::handle encoded, nb::handle residual,
                                        nb::handle source) {
    const Codec codec = codec_of(code);
    const Buffer to(encoded, true), left(residual, true), from(source, false);
    check_sizes(codec, to, from);
    require(left.size() == from.size(), "the residual must be of the source's size");
    std::size_t num_beyond = 0;
    without_lock(from.size(), [&] {
        num_beyond =
            encode_with_residual(codec, to.data(), left.data(), from.data(), from.size() / 4);
    });
    return num_beyond;
}

template <void (*Decode)(Codec, void*, const void*, std::size_t)>
void decode_buffer(int code, nb::handle target, nb::handle encoded) {
    const Codec codec = codec_of(code);
    const Buffer to(target, true), from(encoded, false);
    check_sizes(codec, from, to);
    without_lock(to.size(), [&] { Decode(codec, to.data(), from.data(), to.size() / 4); });
}

void select_largest_buffers(nb::handle positions, nb::handle values, nb::handle source,
                            nb::handle residual, std::size_t chunk, std::size_t k,
                            std::size_t last_k) {
    const Buffer to(positions, true), taken(values, true), from(source, false);
    const std::size_t count = from.size() / 4;
    require(from.size() % 4 == 0 && count < (std::size_t{1} << 32), "the source is not float32");
    require(chunk > 0 && 0 < k && k <= chunk, "k must be between 1 and the chunk");
    const std::size_t rest = count % chunk;
    require(rest == 0 ? last_k == 0 : 0 < last_k && last_k <= rest,
            "the last k must be between 1 and the last chunk");
    const std::size_t bytes = 4 * (count / chunk * k + last_k);
    require(to.size() == bytes && taken.size() == bytes, "the results are not of the right size");
    std::optional<Buffer> sum;
    if (!residual.is_none()) {
        sum.emplace(residual, true);
        require(sum->size() == from.size(), "the residual must be of the source's size");
    }
    without_lock(from.size(), [&] {
        select_largest(static_cast<std::uint32_t*>(to.data()), taken.data(), from.data(),
                       sum ? sum->data() : nullptr, count, chunk, k, last_k);
    });
}

std::int64_t count_values_of(nb::handle text, std::int64_t most, std::size_t max_depth) {
    const Buffer from(text, false);
    return count_values(static_cast<const std::uint8_t*>(from.data()), from.size(), most,
                        max_depth);
}

void multiply_buffers(int dtype_code, nb::handle target, nb::handle left, nb::handle right,
                      std::size_t rank) {
    const Dtype dtype = dtype_of(dtype_code);
    const Multiply multiply = potluck::kernels().multiply[static_cast<int>(dtype)];
    require(multiply != nullptr, "only float32 and float64 matrices are multiplied");
    require(rank > 0, "the rank must be at least 1");
    const Buffer to(target, true), l(left, false), r(right, false);
    const std::size_t item = item_bytes(dtype), row = item * rank;
    require(l.size() % row == 0 && r.size() % row == 0, "the factors are not of this rank");
    const std::size_t n = l.size() / row, m = r.size() / row;
    require(to.size() % item == 0 && (m == 0 ? to.size() == 0 : to.size() / item / m == n &&
            to.size() / item % m == 0), "the result is not of the right size");
    without_lock(to.size(), [&] { multiply(to.data(), l.data(), r.data(), n, m, rank); });
}

}  // namespace

void kernels(nb::module_& m) {
    using namespace nb::literals;
    m.def("combine", combine_buffers, "dtype"_a, "op"_a, "target"_a, "source"_a);
    m.def("combine_many", combine_many_buffers, "dtype"_a, "op"_a, "target"_a, "sources"_a);
    m.def("divide", divide_buffer, "dtype"_a, "array"_a, "divisor"_a);
    m.def("encode", encode_buffer, "codec"_a, "encoded"_a, "source"_a);
    m.def("encode_with_residual", encode_with_residual_buffer, "codec"_a, "encoded"_a,
          "residual"_a, "source"_a);
    m.def("decode", decode_buffer<decode>, "codec"_a, "target"_a, "encoded"_a);
    m.def("decode_accumulate", decode_buffer<decode_accumulate>, "codec"_a, "target"_a,
          "encoded"_a);
    m.def("select_largest", select_largest_buffers, "positions"_a, "values"_a, "source"_a,
          "residual"_a.none(), "chunk"_a, "k"_a, "last_k"_a);
    m.def("multiply", multiply_buffers, "dtype"_a, "target"_a, "left"_a, "right"_a, "rank"_a);
    m.def("count_values", count_values_of, "text"_a, "most"_a, "max_depth"_a);
    m.def("kernel_sets", kernel_sets, "The instruction sets that kernels exist for and run here.");
    m.def("kernel_set", [] { return std::string(potluck::kernels().name); });
    m.def("use_kernel_set", use_kernel_set, "name"_a);
}

}  // namespace potluck::bind
