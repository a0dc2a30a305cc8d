// Single kernels for tests: each call names its kernel set. Nothing here is used while serving.
//
// Inputs and scratch of the packed kernels are copied into memory of exactly the stated size and alignment, so that a
// sanitizer sees every access past it.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>

#include <cstring>
#include <memory>
#include <new>
#include <optional>
#include <string>

#include "bindings_checks.h"
#include "kernels.h"

using namespace nanobind::literals;

namespace firstlight {
namespace {

constexpr std::align_val_t kAlign{64};

struct Free {
  void operator()(uint8_t* p) const { ::operator delete(p, kAlign); }
};
using Memory = std::unique_ptr<uint8_t, Free>;

Memory zeroed(size_t bytes) {
  Memory m(static_cast<uint8_t*>(::operator new(bytes, kAlign)));
  std::memset(m.get(), 0, bytes);
  return m;
}

const Kernels& named(const std::string& name) {
  const Kernels* k = find_kernels(name.c_str());
  if (!k) refuse("kernels `" + name + "` are unknown or this processor cannot run them");
  return *k;
}

void need(const char* name, size_t got, size_t wanted) {
  if (got != wanted) {
    refuse("`" + std::string(name) + "` has " + std::to_string(got) + " elements, must have " + std::to_string(wanted));
  }
}

ActKind act_of(const std::string& name) {
  if (name == "int8") return ActKind::kInt8;
  if (name == "int16") return ActKind::kInt16;
  if (name == "float") return ActKind::kFloat;
  refuse("unknown form of activations `" + name + "`");
}

void quantise_all(const Kernels& k, const Activations& a, const In<float, 2>& x) {
  for (int row = 0; row < a.num_rows; ++row) {
    k.quantise(x.data() + static_cast<size_t>(row) * static_cast<size_t>(a.cols), a, row, 0, act_groups(a));
  }
}

size_t activation_bytes(const std::string& act, int num_rows, int cols) {
  const ActKind kind = act_of(act);
  check_range("num_rows", num_rows, 1, 1 << 20);
  check_range("cols", cols, 1, 1 << 20);
  if (kind != ActKind::kFloat && cols % 32 != 0) refuse("`cols` must be a multiple of 32");
  return act_bytes(kind, num_rows, cols);
}

void quantise(const std::string& kernels, const std::string& act, In<float, 2> x, Out<uint8_t, 1> out) {
  const Kernels& k = named(kernels);
  const int rows = static_cast<int>(x.shape(0)), cols = static_cast<int>(x.shape(1));
  const size_t bytes = activation_bytes(act, rows, cols);
  need("out", out.shape(0), bytes);
  const Memory memory = zeroed(bytes);
  quantise_all(k, act_view(act_of(act), k.act_layout(act_of(act), rows), rows, cols, memory.get()), x);
  std::memcpy(out.data(), memory.get(), bytes);
}

struct Packed {
  Weight weight;
  Memory data;
};

Packed packed(const std::string& kind, int rows, int cols, int group, bool has_min, bool scale_f32,
              const In<uint8_t, 1>& data) {
  Packed p{checked_weight(kind, rows, cols, group, has_min, scale_f32), nullptr};
  need("data", data.shape(0), p.weight.total_bytes());
  p.data = zeroed(data.shape(0));
  std::memcpy(p.data.get(), data.data(), data.shape(0));
  p.weight.data = p.data.get();
  return p;
}

void gemm(const std::string& kernels, const std::string& kind, int rows, int cols, int group, bool has_min,
          bool scale_f32, In<uint8_t, 1> data, In<float, 2> x, std::optional<In<float, 1>> bias, bool accumulate,
          Out<float, 2> y, int begin, int end) {
  const Kernels& k = named(kernels);
  const Packed p = packed(kind, rows, cols, group, has_min, scale_f32, data);
  const int num = static_cast<int>(x.shape(0));
  check_range("rows of `x`", num, 1, 1 << 20);
  need("a row of `x`", x.shape(1), static_cast<size_t>(cols));
  need("`y`'s rows", y.shape(0), x.shape(0));
  if (y.shape(1) < static_cast<size_t>(rows)) refuse("`y` is narrower than the weight has rows");
  if (bias) need("bias", bias->shape(0), static_cast<size_t>(rows));
  check_range("end", end, 0, p.weight.row_blocks() + 1);
  check_range("begin", begin, 0, end + 1);
  const ActKind act = act_kind(p.weight);
  const Memory memory = zeroed(act_bytes(act, num, cols)), scratch = zeroed(gemm_scratch_bytes(cols));
  const Activations a = act_view(act, k.act_layout(act, num), num, cols, memory.get());
  nb::gil_scoped_release released;
  quantise_all(k, a, x);
  k.gemm(p.weight, a, bias ? bias->data() : nullptr, accumulate, y.data(), y.shape(1), begin, end, scratch.get());
}

void dequantise_row(const std::string& kind, int rows, int cols, int group, bool has_min, bool scale_f32,
                    In<uint8_t, 1> data, int row, Out<float, 1> out) {
  const Packed p = packed(kind, rows, cols, group, has_min, scale_f32, data);
  check_range("row", row, 0, rows);
  need("out", out.shape(0), static_cast<size_t>(cols));
  scalar::dequantise_row(p.weight, row, out.data());
}

void rms_norm(const std::string& kernels, In<float, 1> x, In<float, 1> weight, float eps, Out<float, 1> out) {
  need("weight", weight.shape(0), x.shape(0));
  need("out", out.shape(0), x.shape(0));
  named(kernels).rms_norm(x.data(), weight.data(), eps, static_cast<int>(x.shape(0)), out.data());
}

void gated(const std::string& kernels, const std::string& kind, In<float, 1> gate, In<float, 1> up, Out<float, 1> out) {
  need("up", up.shape(0), gate.shape(0));
  need("out", out.shape(0), gate.shape(0));
  named(kernels).gated(gated_of(kind), gate.data(), up.data(), static_cast<int>(gate.shape(0)), out.data());
}

void rope(const std::string& kernels, Out<float, 2> x, int rotary_dim, bool interleaved, In<float, 1> cos,
          In<float, 1> sin) {
  const int heads = static_cast<int>(x.shape(0)), dim = static_cast<int>(x.shape(1));
  if (rotary_dim < 2 || rotary_dim % 2 != 0 || rotary_dim > dim) refuse("`rotary_dim` must be even, at most head_dim");
  need("cos", cos.shape(0), static_cast<size_t>(rotary_dim / 2));
  need("sin", sin.shape(0), static_cast<size_t>(rotary_dim / 2));
  named(kernels).rope(x.data(), heads, dim, rotary_dim, interleaved, cos.data(), sin.data());
}

void soft_cap(const std::string& kernels, Out<float, 1> x, float cap) {
  named(kernels).soft_cap(x.data(), cap, static_cast<int>(x.shape(0)));
}

// cache is [num_blocks, 2 * num_kv_heads * head_dim * block_size] float16 bits.
KvView view_of(const uint16_t* base, size_t block_elements, int num_kv_heads, int head_dim, int block_size) {
  check_range("num_kv_heads", num_kv_heads, 1, 1 << 10);
  if (head_dim < 16 || head_dim % 16 != 0 || head_dim > 1024) refuse("`head_dim` must be a multiple of 16, up to 1024");
  if (block_size < 16 || block_size % 16 != 0 || block_size > 1 << 16) refuse("`block_size` must be a multiple of 16");
  const KvView kv{const_cast<uint16_t*>(base), num_kv_heads, head_dim, block_size};
  need("a block of `cache`", block_elements, kv.block_elements());
  return kv;
}

void write_kv(const std::string& kernels, Out<uint16_t, 2> cache, int block_size, int block, int slot, In<float, 2> k,
              In<float, 2> v) {
  const Kernels& set = named(kernels);
  if (k.shape(0) != v.shape(0) || k.shape(1) != v.shape(1)) refuse("`k` and `v` differ in shape");
  const KvView kv =
      view_of(cache.data(), cache.shape(1), static_cast<int>(k.shape(0)), static_cast<int>(k.shape(1)), block_size);
  check_range("block", block, 0, static_cast<long long>(cache.shape(0)));
  check_range("slot", slot, 0, block_size);
  set.write_kv(kv, block, slot, k.data(), v.data());
}

void attend(const std::string& kernels, In<uint16_t, 2> cache, int num_kv_heads, int block_size, In<float, 2> q,
            In<int32_t, 1> first, In<int32_t, 1> limit, In<int32_t, 1> table, int kv_head, int split, float cap,
            Out<float, 2> result) {
  const Kernels& set = named(kernels);
  const size_t rows = q.shape(0), dim = q.shape(1);
  const KvView kv = view_of(cache.data(), cache.shape(1), num_kv_heads, static_cast<int>(dim), block_size);
  need("first", first.shape(0), rows);
  need("limit", limit.shape(0), rows);
  need("`result`'s rows", result.shape(0), rows);
  need("a row of `result`", result.shape(1), split_result_floats(kv.head_dim));
  check_range("kv_head", kv_head, 0, num_kv_heads);
  const long long keys = static_cast<long long>(table.shape(0)) * block_size;
  check_range("split", split, 0, keys / kSplit + 1);
  for (size_t r = 0; r < rows; ++r) {
    check_range("limit", limit.data()[r], 0, keys + 1);
    check_range("first", first.data()[r], 0, static_cast<long long>(limit.data()[r]) + 1);
  }
  for (size_t b = 0; b < table.shape(0); ++b) {
    check_range("block id", table.data()[b], 0, static_cast<long long>(cache.shape(0)));
  }
  SplitQuery query{q.data(), first.data(), limit.data(), static_cast<int>(rows), table.data(), kv_head, split, cap};
  const Memory scratch = zeroed(attention_scratch_floats(kv.head_dim) * sizeof(float));
  set.attend_split(kv, query, result.data(), reinterpret_cast<float*>(scratch.get()));
}

void merge(const std::string& kernels, Out<float, 2> running, In<float, 2> part) {
  const size_t floats = running.shape(1);
  if (floats < 18 || floats % 16 != 2) refuse("a row of `running` must be head_dim + 2 long");
  need("`part`'s rows", part.shape(0), running.shape(0));
  need("a row of `part`", part.shape(1), floats);
  named(kernels).merge_split(running.data(), part.data(), static_cast<int>(running.shape(0)),
                             static_cast<int>(floats) - 2);
}

void finish(In<float, 1> running, Out<float, 1> out) {
  need("running", running.shape(0), out.shape(0) + 2);
  scalar::finish(running.data(), static_cast<int>(out.shape(0)), out.data());
}

}  // namespace

void bind_kernels(nb::module_& m) {
  m.attr("KEYS_PER_SPLIT") = kSplit;
  m.def("kernel_activation_bytes", &activation_bytes, "act"_a, "num_rows"_a, "cols"_a);
  m.def("kernel_quantise", &quantise, "kernels"_a, "act"_a, "x"_a.noconvert(), "out"_a.noconvert());
  m.def("kernel_gemm", &gemm, "kernels"_a, "kind"_a, "rows"_a, "cols"_a, "group"_a, "has_min"_a, "scale_f32"_a,
        "data"_a.noconvert(), "x"_a.noconvert(), nb::kw_only(), "bias"_a.none(), "accumulate"_a, "y"_a.noconvert(),
        "begin"_a, "end"_a);
  m.def("kernel_dequantise_row", &dequantise_row, "kind"_a, "rows"_a, "cols"_a, "group"_a, "has_min"_a, "scale_f32"_a,
        "data"_a.noconvert(), "row"_a, "out"_a.noconvert());
  m.def("kernel_rms_norm", &rms_norm, "kernels"_a, "x"_a.noconvert(), "weight"_a.noconvert(), "eps"_a,
        "out"_a.noconvert());
  m.def("kernel_gated", &gated, "kernels"_a, "kind"_a, "gate"_a.noconvert(), "up"_a.noconvert(), "out"_a.noconvert());
  m.def("kernel_rope", &rope, "kernels"_a, "x"_a.noconvert(), "rotary_dim"_a, "interleaved"_a, "cos"_a.noconvert(),
        "sin"_a.noconvert());
  m.def("kernel_soft_cap", &soft_cap, "kernels"_a, "x"_a.noconvert(), "cap"_a);
  m.def("kernel_write_kv", &write_kv, "kernels"_a, "cache"_a.noconvert(), "block_size"_a, "block"_a, "slot"_a,
        "k"_a.noconvert(), "v"_a.noconvert());
  m.def("kernel_attend", &attend, "kernels"_a, "cache"_a.noconvert(), "num_kv_heads"_a, "block_size"_a,
        "q"_a.noconvert(), "first"_a.noconvert(), "limit"_a.noconvert(), "table"_a.noconvert(), "kv_head"_a, "split"_a,
        "soft_cap"_a, "result"_a.noconvert());
  m.def("kernel_merge", &merge, "kernels"_a, "running"_a.noconvert(), "part"_a.noconvert());
  m.def("kernel_finish", &finish, "running"_a.noconvert(), "out"_a.noconvert());
}

}  // namespace firstlight
