#include "maxdiffusion/nn/few_bits.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstring>
#include <span>
#include <thread>

#include "maxdiffusion/autodiff/checkpoint.h"
#include "maxdiffusion/base/dynamic_map.h"
#include "maxdiffusion/base/error.h"
#include "maxdiffusion/base/half.h"
#include "maxdiffusion/base/host_array_rows.h"
#include "maxdiffusion/base/mapped_memory.h"
#include "maxdiffusion/base/nearest.h"
#include "maxdiffusion/base/nf4.h"
#include "maxdiffusion/base/parallel.h"
#include "maxdiffusion/base/vectorized.h"
#include "maxdiffusion/kernels/kernels.h"
#include "maxdiffusion/nn/param.h"
#include "maxdiffusion/ops/custom_call.h"
#include "maxdiffusion/ops/elementwise.h"
#include "maxdiffusion/ops/gather.h"
#include "maxdiffusion/ops/shape.h"

namespace md {
namespace {

constexpr int64_t kBlock = kNf4Block, kNestedBlock = kNf4NestedBlock;
constexpr float kLargestFloat8 = 448;

/// The place of the nearest value of a sorted table; of two that are as near, the first. Without branches, which would
/// be mispredicted.
template <size_t n>
size_t nearest_of(const std::array<float, n>& map, float v) {
  static_assert(std::has_single_bit(n));
  size_t below = 0;  // values less than v, but for the last
  for (size_t half = n / 2; half > 0; half /= 2) below += half & -static_cast<size_t>(map[below + half - 1] < v);
  const size_t after = below + (below == 0);
  return after - static_cast<size_t>(v - map[after - 1] <= map[after] - v);
}

/// Codes of kNf4 for a block, two in a byte: the number of midpoints between its values that are smaller, found by
/// halving: midpoint k, between values k − 1 and k, is selected by the bits that are known.
MD_VECTORIZED void nf4_codes(const float* x, float by, uint8_t* bytes) {
  constexpr auto middle = [](size_t k) { return (kNf4[k - 1] + kNf4[k]) / 2; };
  int32_t codes[kBlock];
#pragma omp simd
  for (int64_t i = 0; i < kBlock; ++i) {
    const float v = x[i] * by;
    const bool bit3 = v > middle(8);
    const float m1 = bit3 ? middle(9) : middle(1), m2 = bit3 ? middle(10) : middle(2),
                m3 = bit3 ? middle(11) : middle(3), m4 = bit3 ? middle(12) : middle(4),
                m5 = bit3 ? middle(13) : middle(5), m6 = bit3 ? middle(14) : middle(6),
                m7 = bit3 ? middle(15) : middle(7);
    const bool bit2 = v > m4;
    const float n1 = bit2 ? m5 : m1, n2 = bit2 ? m6 : m2, n3 = bit2 ? m7 : m3;
    const bool bit1 = v > n2, bit0 = v > (bit1 ? n3 : n1);
    codes[i] = (bit3 ? 8 : 0) + (bit2 ? 4 : 0) + (bit1 ? 2 : 0) + (bit0 ? 1 : 0);
  }
  for (int64_t i = 0; i < kBlock / 2; ++i) bytes[i] = static_cast<uint8_t>(codes[2 * i] << 4 | codes[2 * i + 1]);
}

/// The largest magnitude.
MD_VECTORIZED float largest_of(const float* x, int64_t n) {
  float most = 0;
#pragma omp simd reduction(max : most)
  for (int64_t i = 0; i < n; ++i) {
    const float magnitude = std::fabs(x[i]);
    most = magnitude > most ? magnitude : most;
  }
  return most;
}

/// The nearest integers of x / scale, which are at most 127; ties to even.
MD_VECTORIZED void int8_row(const float* x, float scale, std::byte* out, int64_t n) {
  constexpr float kRound = 12582912.0F;  // 1.5·2²³: numbers of its size are whole
  for (int64_t i = 0; i < n; ++i) out[i] = static_cast<std::byte>(static_cast<int32_t>(x[i] / scale + kRound - kRound));
}

MD_VECTORIZED void divide_row(const float* x, float scale, float* out, int64_t n) {
  for (int64_t i = 0; i < n; ++i) out[i] = x[i] / scale;
}

/// Calls f(first row, one past the last) for ranges of rows of `matrix`, on all cores; on several threads a core if its
/// pages are a file's, because a thread that reads them waits most of the time.
void by_rows(const HostArray& matrix, int64_t rows, int64_t row, const std::function<void(int64_t, int64_t)>& f) {
  const bool reads = is_mapped(matrix.data(), matrix.bytes());
  const int64_t some = std::max<int64_t>(1, (1 << 18) / std::max<int64_t>(row, 1));
  parallel_for((rows + some - 1) / some, [&](int64_t part, int) { f(part * some, std::min(rows, (part + 1) * some)); },
               reads ? 4 * static_cast<int>(std::thread::hardware_concurrency()) : 0);
}

/// Numbers [from, from + n) of an array in float32; `buffer` holds them if they are of another type.
const float* in_float(const HostArray& a, int64_t from, int64_t n, std::vector<float>& buffer) {
  const std::byte* in = a.data() + static_cast<size_t>(from) * size_of(a.dtype());
  if (a.dtype() == DType::f32) return reinterpret_cast<const float*>(in);
  buffer.resize(static_cast<size_t>(n));
  convert_elements(a.dtype(), in, DType::f32, buffer.data(), buffer.size());
  return buffer.data();
}

void scaled_rows(FewBitsType type, const HostArray& matrix, std::byte* values, float* scales) {
  const int64_t rows = matrix.dims()[0], row = matrix.dims()[1];
  by_rows(matrix, rows, row, [&](int64_t from, int64_t end) {
    std::vector<float> scaled(static_cast<size_t>(row)), buffer;
    for (int64_t r = from; r < end; ++r) {
      const float* in = in_float(matrix, r * row, row, buffer);
      const float most = largest_of(in, row), limit = type == FewBitsType::int8 ? 127 : kLargestFloat8;
      const float scale = most > 0 ? most / limit : 1;
      scales[r] = scale;
      if (type == FewBitsType::int8) {
        int8_row(in, scale, values + r * row, row);
        continue;
      }
      divide_row(in, scale, scaled.data(), row);
      convert_elements(DType::f32, scaled.data(), DType::f8e4m3fn, values + r * row, static_cast<size_t>(row));
    }
  });
}

void normal_floats(const HostArray& matrix, std::byte* values, uint8_t* codes, float* nested, float& offset) {
  const int64_t blocks = matrix.shape().elements() / kBlock;
  std::vector<float> largest(static_cast<size_t>(blocks));
  by_rows(matrix, blocks, kBlock, [&](int64_t from, int64_t end) {
    constexpr int64_t kSome = 64;  // blocks that are widened at a time
    std::vector<float> buffer;
    const float* in = nullptr;
    for (int64_t b = from; b < end; ++b, in += kBlock) {
      if ((b - from) % kSome == 0) in = in_float(matrix, b * kBlock, std::min(kSome, end - b) * kBlock, buffer);
      const float most = largest_of(in, kBlock), inverse = most > 0 ? 1 / most : 0;
      largest[static_cast<size_t>(b)] = most;
      nf4_codes(in, inverse, reinterpret_cast<uint8_t*>(values + b * kBlock / 2));
    }
  });
  double sum = 0;
  for (const float v : largest) sum += static_cast<double>(v);
  const auto mean = static_cast<float>(sum / static_cast<double>(blocks));
  const int64_t nested_blocks = (blocks + kNestedBlock - 1) / kNestedBlock;
  constexpr int64_t kSome = 256;  // nested blocks that a thread takes at a time
  const auto& map = dynamic_map(true);
  parallel_for((nested_blocks + kSome - 1) / kSome, [&](int64_t part, int) {
    for (int64_t b = part * kSome; b < std::min(nested_blocks, (part + 1) * kSome); ++b) {
      const std::span some = std::span(largest).subspan(static_cast<size_t>(b * kNestedBlock));
      const std::span block = some.first(std::min<size_t>(some.size(), kNestedBlock));
      float most = 0;
      for (const float v : block) most = std::max(most, std::fabs(v - mean));
      nested[b] = most;
      const float inverse = most > 0 ? 1 / most : 0;
      uint8_t* code = codes + b * kNestedBlock;
      for (const float v : block) *code++ = static_cast<uint8_t>(nearest_of(map, (v - mean) * inverse));
    }
  });
  offset = mean;
}

/// Writes the arrays that few_bits_arrays() lists to `to`.
void quantize(FewBitsType type, const HostArray& matrix, const std::vector<std::byte*>& to) {
  const auto floats = [&](size_t i) { return reinterpret_cast<float*>(to.at(i)); };
  if (type == FewBitsType::nf4)
    return normal_floats(matrix, to.at(0), reinterpret_cast<uint8_t*>(to.at(1)), floats(2), *floats(3));
  scaled_rows(type, matrix, to.at(0), floats(1));
}

Tensor widened_nf4(const Dims& dims, const std::vector<Tensor>& a) {
  const int64_t blocks = dims[0] * dims[1] / kBlock;
  Graph& g = a[0].graph();
  const HostArray map = HostArray::of<float>({DType::f32, {256}}, dynamic_map(true));
  Tensor largest = take(constant(g, map), cast(a[1], DType::s32));
  const int64_t nested = a[2].dim(0);
  Tensor by = reshape(broadcast_to(reshape(a[2], {nested, 1}), {nested, kNestedBlock}), {nested * kNestedBlock});
  by = reshape(slice_axis(by, 0, 0, blocks), {dims[0], dims[1] / kBlock});
  largest = largest * by + reshape(a[3], {1, 1});
  // The two numbers of each byte value.
  std::vector<float> pairs;
  for (size_t byte = 0; byte < 256; ++byte) pairs.insert(pairs.end(), {kNf4[byte >> 4], kNf4[byte & 15]});
  Tensor values = take(constant(g, HostArray::of<float>({DType::f32, {256, 2}}, pairs)), cast(a[0], DType::s32));
  values = reshape(values, {dims[0], dims[1] / kBlock, kBlock}) * reshape(largest, {dims[0], dims[1] / kBlock, 1});
  return reshape(values, dims);
}

/// The numbers of the arrays in `to`; those of rows with scales without their scale.
Tensor widened_values(FewBitsType type, const Dims& dims, const std::vector<Tensor>& a, DType to) {
  const bool nf4 = type == FewBitsType::nf4;
  Graph& g = a[0].graph();
  if (g.options().calls_cpu_kernels() && (to == DType::f32 || to == DType::bf16))
    return custom_call(
        g, nf4 ? a : std::vector{a[0]},
        {.target = nf4 ? kWidenNf4Kernel : kWidenKernel, .results = {{to, dims}}, .backend_config = {}})[0];
  return cast(nf4 ? widened_nf4(dims, a) : a[0], to);
}

bool has_part(const std::string& module, const std::string& part) {
  return ("." + module + ".").find("." + part + ".") != std::string::npos;
}
bool in_block(const std::string& module) {
  for (size_t from = 0, to; from < module.size(); from = to + 1) {
    to = std::min(module.find('.', from), module.size());
    const std::string part = module.substr(from, to - from);
    if (!part.empty() && (is_stacked(part) || std::ranges::all_of(part, [](char c) { return c >= '0' && c <= '9'; })))
      return true;
  }
  return false;
}

}  // namespace

bool FewBits::covers(const std::string& module, const Dims& dims) const {
  if (dims.size() != 2) return false;
  for (const std::string& part : skip)
    if (part == kOutsideBlocks ? !in_block(module) : has_part(module, part)) return false;
  if (type == FewBitsType::nf4 && dims[1] % kBlock != 0) {
    std::vector<std::string> skipped = skip;
    skipped.push_back(module.substr(module.rfind('.') + 1));
    throw Error(Code::invalid_config,
                fmt::format("base weights in nf4: '{}' has rows of {} numbers; expected a multiple "
                            "of {}",
                            module, dims[1], kBlock))
        .note(fmt::format("try: base_quantization_skip=[{}], or int8", fmt::join(skipped, ", ")));
  }
  return true;
}

std::shared_ptr<const FewBits> make_few_bits(const std::string& key, const std::string& name,
                                             const std::vector<std::string>& skip) {
  if (name.empty()) return nullptr;
  for (const auto& [known, type] :
       {std::pair{"float8_e4m3fn", FewBitsType::float8}, {"int8", FewBitsType::int8}, {"nf4", FewBitsType::nf4}})
    if (name == known) return std::make_shared<const FewBits>(FewBits{type, skip});
  fail(Code::invalid_config, "{} is '{}'; expected one of: {}", key, name,
       nearest_first(name, {"float8_e4m3fn", "int8", "nf4"}));
}

std::vector<FewBitsArray> few_bits_arrays(FewBitsType type, const Dims& dims) {
  const int64_t rows = dims.at(0), row = dims.at(1);
  if (type != FewBitsType::nf4)
    return {{"", {type == FewBitsType::int8 ? DType::s8 : DType::f8e4m3fn, dims}, true},
            {".scale", {DType::f32, {rows}}, true}};
  const int64_t blocks = rows * row / kBlock;
  return {{"", {DType::u8, {rows, row / 2}}, true},
          {".absmax", {DType::u8, {rows, row / kBlock}}, true},
          {".nested_absmax", {DType::f32, {(blocks + kNestedBlock - 1) / kNestedBlock}}, false},
          {".nested_offset", {DType::f32, {1}}, false}};
}

std::vector<HostArray> few_bits_of(FewBitsType type, const HostArray& matrix) {
  std::vector<HostArray> out;
  std::vector<std::byte*> to;
  for (const FewBitsArray& a : few_bits_arrays(type, matrix.dims()))
    to.push_back(out.emplace_back(a.shape).mutable_data());
  quantize(type, matrix, to);
  return out;
}

HostArray widened(FewBitsType type, const std::vector<HostArray>& a) {
  const int64_t rows = a.at(0).dims()[0], row = a[0].dims()[1] * (type == FewBitsType::nf4 ? 2 : 1);
  HostArray out({DType::f32, {rows, row}});
  const auto y = out.mutable_view<float>();
  if (type != FewBitsType::nf4) {
    const HostArray values = a[0].cast(DType::f32);
    const auto v = values.view<float>(), scales = a.at(1).view<float>();
    for (size_t i = 0; i < y.size(); ++i) y[i] = v[i] * scales[i / static_cast<size_t>(row)];
    return out;
  }
  const auto codes = a.at(1).view<uint8_t>();
  const auto nested = a.at(2).view<float>();
  const float mean = a.at(3).view<float>()[0];
  for (size_t i = 0; i < y.size(); ++i) {
    const size_t block = i / kBlock;
    const auto byte = std::to_integer<size_t>(a[0].data()[i / 2]);
    y[i] = kNf4[i % 2 == 0 ? byte >> 4 : byte & 15] *
           (dynamic_map(true)[codes[block]] * nested[block / kNestedBlock] + mean);
  }
  return out;
}

Tensor few_bits_product(FewBitsType type, const Dims& dims, Tensor x, const std::vector<Tensor>& arrays,
                        const std::function<Tensor(Tensor, Tensor)>& f) {
  std::vector<Tensor> in = {x};
  in.insert(in.end(), arrays.begin(), arrays.end());
  const auto body = [&](const std::vector<Tensor>& all) -> std::vector<Tensor> {
    const std::vector<Tensor> a(all.begin() + 1, all.end());
    const Tensor y = f(all[0], widened_values(type, dims, a, x.dtype()));
    if (type == FewBitsType::nf4) return {y};
    // Rows of the matrix are the last axis of the result, so their scales apply after the product.
    return {cast(cast(y, DType::f32) * a[1], x.dtype())};
  };
  return checkpoint(remat_policy("MATMUL_WITHOUT_BATCH"), body, in)[0];
}

bool has_few_bits(const ParamTable& params, const std::string& component) {
  return std::ranges::any_of(params.params(), [&](const Param& p) { return p.few_bits && p.model == component; });
}

ParamTable before_few_bits(const ParamTable& params, const std::string& component) {
  ParamTable out;
  for (Param p : params.params()) {
    if (p.model != component || (p.few_bits && p.few_bits->which > 0)) continue;
    if (p.few_bits) {
      p.shape = {DType::f32, p.few_bits->dims};
      if (p.stacked > 0) p.shape.dims.insert(p.shape.dims.begin(), p.stacked);
      p.few_bits = nullptr;
    }
    out.add(std::move(p));
  }
  return out;
}

HostArrays few_bits_values(const ParamTable& params, const std::string& component,
                           const std::function<HostArray(const std::string& path)>& layer) {
  std::map<std::string, std::vector<const Param*>> arrays;  // of each weight
  for (const Param& p : params.params())
    if (p.model == component) arrays[p.few_bits ? p.few_bits->weight : p.path].push_back(&p);
  HostArrays out;
  for (const auto& [path, parts] : arrays) {
    const Param& first = *parts[0];
    const int64_t layers = std::max<int64_t>(first.stacked, 1);
    std::vector<HostArray> whole;
    for (int64_t i = 0; i < layers; ++i) {
      const HostArray one = layer(first.stacked > 0 ? layer_path(path, i) : path);
      if (!first.few_bits && first.stacked == 0) {
        whole = {one.cast(first.shape.dtype)};
        if (whole[0].data() != one.data()) release_pages(one.data(), one.bytes());
        break;
      }
      if (whole.empty())
        for (const Param* p : parts) whole.emplace_back(p->shape);
      std::vector<std::byte*> to;  // this layer's rows
      for (HostArray& w : whole)
        to.push_back(w.mutable_data() + static_cast<size_t>(i) * (w.bytes() / static_cast<size_t>(layers)));
      if (first.few_bits)
        quantize(first.few_bits->type, one, to);
      else
        std::memcpy(to[0], one.cast(first.shape.dtype).data(), whole[0].bytes() / static_cast<size_t>(layers));
      release_pages(one.data(), one.bytes());
    }
    for (size_t k = 0; k < parts.size(); ++k) out[parts[k]->input] = whole.at(k);
  }
  return out;
}

HostArrays few_bits_values(const ParamTable& params, const std::string& component, const HostArrays& before) {
  std::map<std::string, HostArray> layers;
  const ParamTable plain = before_few_bits(params, component);
  for (const Param& p : plain.params()) {
    const HostArray& all = before.at(p.input);
    if (p.stacked == 0) layers[p.path] = all;
    for (int64_t i = 0; i < p.stacked; ++i) layers[layer_path(p.path, i)] = row_of(all, i);
  }
  return few_bits_values(params, component, [&](const std::string& path) { return layers.at(path); });
}

}  // namespace md
