#include "maxdiffusion/nn/param.h"

#include <algorithm>
#include <cmath>
#include <thread>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/ops/random.h"

namespace md {
namespace {

// Standard deviation of a unit normal truncated at ±2.
constexpr double kCutStddev = 0.87962566103423978;
// Below this number of elements a thread costs more than it saves.
constexpr int64_t kMinPerThread = 1 << 14;

/// The elements of a slice as contiguous ranges of the whole array.
class Runs {
 public:
  Runs(const Dims& dims, const Slice& slice) : dims_(dims), slice_(slice) {
    for (size_t d = dims.size(); d-- > 0;) {
      length_ *= slice.size[d];
      if (slice.size[d] != dims[d]) break;
    }
  }
  /// Number of elements in a range.
  int64_t length() const { return length_; }
  /// Index in the whole array of element i of the slice.
  int64_t place(int64_t i) const {
    int64_t place = 0, stride = 1;
    for (size_t d = dims_.size(); d-- > 0;) {
      place += (slice_.start[d] + i % slice_.size[d]) * stride;
      i /= slice_.size[d];
      stride *= dims_[d];
    }
    return place;
  }

 private:
  const Dims& dims_;
  const Slice& slice_;
  int64_t length_ = 1;
};

/// Fills the part `slice` of an array with these sizes.
void fill(const Init& init, uint64_t seed, const std::string& name, const Dims& dims, const Slice& slice,
          std::span<float> out) {
  using Distribution = HostRng::Distribution;
  const HostRng rng(seed, name);
  const auto n = static_cast<int64_t>(out.size());
  const Runs runs(dims, slice);
  auto part = [&](int64_t from, int64_t to) {
    const std::span<float> mine = out.subspan(static_cast<size_t>(from), static_cast<size_t>(to - from));
    auto all = [&](double value) { std::ranges::fill(mine, static_cast<float>(value)); };
    auto sample = [&](Distribution d, double scale) {
      for (int64_t i = from, end; i < to; i = end) {
        end = std::min(to, (i / runs.length() + 1) * runs.length());
        rng.fill(d, scale, static_cast<uint64_t>(runs.place(i)),
                 out.subspan(static_cast<size_t>(i), static_cast<size_t>(end - i)));
      }
    };
    switch (init.kind) {
      case Init::Kind::zeros: return all(0);
      case Init::Kind::ones: return all(1);
      case Init::Kind::constant: return all(init.scale);
      case Init::Kind::normal: return sample(Distribution::normal, init.scale);
      case Init::Kind::uniform: return sample(Distribution::symmetric_uniform, init.scale);
      case Init::Kind::truncated_normal: return sample(Distribution::truncated_normal, init.scale / kCutStddev);
    }
  };
  static const int64_t cores = std::max<int64_t>(1, std::thread::hardware_concurrency());  // the query reads files
  const int64_t parts = std::clamp<int64_t>(n / kMinPerThread, 1, cores);
  std::vector<std::jthread> threads;
  for (int64_t p = 1; p < parts; ++p) threads.emplace_back(part, n * p / parts, n * (p + 1) / parts);
  part(0, n / parts);
}

}  // namespace

namespace init {

namespace {
double fan_in(const char* init, const Dims& weight) {
  check(weight.size() >= 2, Code::invalid_graph, "{}: a weight of shape {} has no fan-in", init, to_string(weight));
  int64_t n = 1;
  for (size_t i = 1; i < weight.size(); ++i) n *= weight[i];
  return static_cast<double>(n);
}
}  // namespace

Init lecun_normal(const Dims& weight) {
  return {Init::Kind::truncated_normal, 1 / std::sqrt(fan_in("lecun_normal", weight))};
}

Init xavier_uniform(const Dims& weight) {
  const double in = fan_in("xavier_uniform", weight);
  return uniform(std::sqrt(6 / (in + static_cast<double>(weight[0]))));
}

}  // namespace init

Param& ParamTable::add(Param p) {
  p.input = p.model + "/" + p.path;
  check(!index_.contains(p.input), Code::invalid_graph, "parameter '{}' exists already", p.input);
  index_[p.input] = params_.size();
  params_.push_back(std::move(p));
  return params_.back();
}

const Param* ParamTable::find(const std::string& input) const {
  auto it = index_.find(input);
  return it == index_.end() ? nullptr : &params_[it->second];
}

/// Number of elements; of the weight if it is quantized.
static int64_t numbers_of(const Param& p) {
  if (!p.few_bits) return p.shape.elements();
  return p.few_bits->which > 0 ? 0 : std::max<int64_t>(p.stacked, 1) * Shape{DType::f32, p.few_bits->dims}.elements();
}

int64_t ParamTable::count() const {
  int64_t n = 0;
  for (const Param& p : params_) n += numbers_of(p);
  return n;
}

int64_t ParamTable::count(const std::string& model) const {
  int64_t n = 0;
  for (const Param& p : params_)
    if (p.model == model) n += numbers_of(p);
  return n;
}

int64_t ParamTable::first_blocks(const std::string& model, const std::string& path, int64_t n, int64_t most) {
  int64_t before = 0;
  auto at = stacks_.begin();
  for (; at != stacks_.end() && (at->model != model || at->path != path); ++at)
    if (at->model == model) before += at->blocks;
  if (at == stacks_.end()) stacks_.push_back({model, path, n});
  return std::clamp(most - before, int64_t{0}, n);
}

int64_t ParamTable::blocks(const std::string& model) const {
  int64_t n = 0;
  for (const Stack& s : stacks_)
    if (s.model == model) n += s.blocks;
  return n;
}

HostArray initial_value(const Param& p, uint64_t seed) { return initial_value(p, seed, Slice::all(p.shape.dims)); }

HostArray initial_value(const Param& p, uint64_t seed, const Slice& slice) {
  check(slice.within(p.shape.dims), Code::internal, "initial value of '{}': {} is not a part of {}", p.input,
        to_string(slice), to_string(p.shape));
  HostArray value({DType::f32, slice.size});
  auto all = value.mutable_view<float>();
  if (p.stacked == 0) {
    fill(p.init, seed, p.input, p.shape.dims, slice, all);
  } else {
    auto rest = [](const std::vector<int64_t>& v) { return std::vector<int64_t>(v.begin() + 1, v.end()); };
    const Slice in_layer{rest(slice.start), rest(slice.size)};
    const size_t elements = static_cast<size_t>(in_layer.elements());
    for (int64_t i = 0; i < slice.size[0]; ++i)
      fill(p.init, seed, p.model + "/" + layer_path(p.path, slice.start[0] + i), rest(p.shape.dims), in_layer,
           all.subspan(static_cast<size_t>(i) * elements, elements));
  }
  return p.shape.dtype == DType::f32 ? value : value.cast(p.shape.dtype);
}

}  // namespace md
