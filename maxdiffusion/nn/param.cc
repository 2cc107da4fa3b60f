#include "maxdiffusion/nn/param.h"

#include <algorithm>
#include <cmath>
#include <thread>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/ops/random.h"

namespace md {
namespace {

// Standard deviation of a unit normal cut at ±2.
constexpr double kCutStddev = 0.87962566103423978;
// Elements below which a thread costs more than it saves.
constexpr int64_t kMinPerThread = 1 << 14;

void fill(const Init& init, uint64_t seed, const std::string& name, std::span<float> out) {
  using Draw = HostRng::Distribution;
  const HostRng rng(seed, name);
  const auto n = static_cast<int64_t>(out.size());
  auto part = [&](int64_t from, int64_t to) {
    const std::span<float> mine = out.subspan(static_cast<size_t>(from), static_cast<size_t>(to - from));
    auto all = [&](double value) { std::ranges::fill(mine, static_cast<float>(value)); };
    auto draw = [&](Draw d, double scale) { rng.fill(d, scale, static_cast<uint64_t>(from), mine); };
    switch (init.kind) {
      case Init::Kind::zeros: return all(0);
      case Init::Kind::ones: return all(1);
      case Init::Kind::constant: return all(init.scale);
      case Init::Kind::normal: return draw(Draw::normal, init.scale);
      case Init::Kind::uniform: return draw(Draw::symmetric_uniform, init.scale);
      case Init::Kind::truncated_normal: return draw(Draw::truncated_normal, init.scale / kCutStddev);
    }
  };
  const int64_t cores = std::max<int64_t>(1, std::thread::hardware_concurrency());
  const int64_t parts = std::clamp<int64_t>(n / kMinPerThread, 1, cores);
  std::vector<std::jthread> threads;
  for (int64_t p = 1; p < parts; ++p) threads.emplace_back(part, n * p / parts, n * (p + 1) / parts);
  part(0, n / parts);
}

}  // namespace

namespace init {

Init lecun_normal(const Dims& weight) {
  check(weight.size() >= 2, Code::invalid_graph, "lecun_normal: a weight of shape {} has no fan-in", to_string(weight));
  int64_t fan_in = 1;
  for (size_t i = 1; i < weight.size(); ++i) fan_in *= weight[i];
  return {Init::Kind::truncated_normal, 1 / std::sqrt(static_cast<double>(fan_in))};
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

int64_t ParamTable::count() const {
  int64_t n = 0;
  for (const Param& p : params_) n += p.shape.elements();
  return n;
}

int64_t ParamTable::count(const std::string& model) const {
  int64_t n = 0;
  for (const Param& p : params_)
    if (p.model == model) n += p.shape.elements();
  return n;
}

std::string layer_path(const std::string& path, int64_t layer) {
  const size_t star = path.find('*');
  check(star != std::string::npos, Code::internal, "'{}' is not the path of a stacked parameter", path);
  return path.substr(0, star) + std::to_string(layer) + path.substr(star + 1);
}

HostArray initial_value(const Param& p, uint64_t seed) {
  HostArray value({DType::f32, p.shape.dims});
  auto all = value.mutable_view<float>();
  if (p.stacked == 0) {
    fill(p.init, seed, p.input, all);
  } else {
    const size_t layer = all.size() / static_cast<size_t>(p.stacked);
    for (int64_t i = 0; i < p.stacked; ++i)
      fill(p.init, seed, p.model + "/" + layer_path(p.path, i), all.subspan(static_cast<size_t>(i) * layer, layer));
  }
  return p.shape.dtype == DType::f32 ? value : value.cast(p.shape.dtype);
}

}  // namespace md
