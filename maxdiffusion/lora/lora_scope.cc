#include "maxdiffusion/lora/lora_scope.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <cstring>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/ops/elementwise.h"
#include "maxdiffusion/ops/shape.h"

namespace md {
namespace {

const std::string kDown = ".lora_A.weight", kUp = ".lora_B.weight";

bool is_named(const std::string& path, const std::string& target) {
  return path == target || path.ends_with("." + target);
}

bool is_target(const std::string& path, const std::vector<std::string>& targets) {
  return std::ranges::any_of(targets, [&](const std::string& t) { return is_named(path, t); });
}

Tensor adapted(const LoraConfig& c, const Scope& before, const Weight& w, Tensor x, const Product& f) {
  Tensor y = before.product(w, x, f);
  if (w.name != "weight" || !is_target(before.path(), c.targets)) return y;
  ScopeOptions options = before.options();
  options.trainable = true;
  options.weights = DType::f32;
  const Scope own = before.with(options);

  Dims down = w.dims, up(w.dims.size(), 1);
  LogicalAxes down_axes = w.axes, up_axes(w.dims.size());
  down[0] = up[1] = c.rank;
  up[0] = w.dims[0];
  down_axes[0] = "";
  up_axes[0] = w.axes[0];
  const int64_t inputs = Shape{DType::f32, down}.elements() / c.rank;
  const double fan_in = static_cast<double>(inputs);
  Tensor a = own.param(kDown.substr(1), down, down_axes, init::uniform(1 / std::sqrt(fan_in)));
  Tensor b = own.param(kUp.substr(1), up, up_axes, init::zeros());
  Tensor h = f(x, cast(a, x.dtype())) * (c.alpha / static_cast<double>(c.rank));
  return y + dot(h, cast(reshape(b, {up[0], c.rank}), x.dtype()),
                 {.lhs_contract = {h.rank() - 1}, .rhs_contract = {1}, .precision = options.precision});
}

/// "….to_q.lora_A.weight" → "….to_q.weight", whatever matrix it names.
std::string base_path(const Param& p) { return p.path.substr(0, p.path.size() - kDown.size()) + ".weight"; }

/// Layers of a stacked parameter, or the one of another.
int64_t layers(const Param& p) { return std::max<int64_t>(p.stacked, 1); }
std::string published_path(const Param& p, int64_t layer) {
  return p.stacked > 0 ? layer_path(base_path(p), layer) : base_path(p);
}
Dims layer_dims(const Param& p) { return Dims(p.shape.dims.begin() + (p.stacked > 0), p.shape.dims.end()); }

}  // namespace

Scope lora_scope(const Scope& s, const LoraConfig& config) {
  check(config.rank > 0, Code::invalid_config, "lora_rank {} is not a positive number", config.rank);
  return s.frozen().with_product([config](const Scope& before, const Weight& w, Tensor x, const Product& f) {
    return adapted(config, before, w, x, f);
  });
}

void check_lora_targets(const std::vector<std::string>& targets, const ParamTable& params) {
  std::vector<std::string> unmatched;
  for (const std::string& t : targets)
    if (std::ranges::none_of(params.params(), [&](const Param& p) {
          return p.path.ends_with(kDown) && is_named(p.path.substr(0, p.path.size() - kDown.size()), t);
        }))
      unmatched.push_back(t);
  if (unmatched.empty()) return;
  Error e(Code::invalid_config,
          fmt::format("lora_target_modules: no linear or convolution layer is called {}", fmt::join(unmatched, ", ")));
  e.note("names are ends of module paths, as in to_q, to_out.0, conv1");
  if (std::ranges::any_of(params.params(), [](const Param& p) { return p.stacked > 0; }))
    e.note("with scan_layers '*' is the number of a block");
  throw e;
}

bool is_lora(const Param& p) { return p.path.ends_with(kDown) || p.path.ends_with(kUp); }

ParamTable base_params(const ParamTable& params) {
  ParamTable out;
  for (const Param& p : params.params())
    if (!is_lora(p)) out.add(p);
  return out;
}

HostArrays initial_lora(const ParamTable& params, uint64_t seed) {
  HostArrays out;
  for (const Param& p : params.params())
    if (is_lora(p)) out[p.input] = initial_value(p, seed);
  return out;
}

HostArrays initial_lora(const ParamTable& params, const LoraFile& file, const LoraConfig& config) {
  check(file.differences.empty(), Code::invalid_config,
        "lora_init '{}': it also holds full-rank differences of weights or biases, which are not trained", file.name);
  HostArrays out;
  std::vector<std::string> missing, unused;
  std::map<std::string, std::map<std::string, LoraPair>> left = file.pairs;
  for (const Param& p : params.params()) {
    if (!is_lora(p)) continue;
    const bool is_down = p.path.ends_with(kDown);
    HostArray all(Shape{DType::f32, p.shape.dims});
    const size_t bytes = all.bytes() / static_cast<size_t>(layers(p));
    for (int64_t i = 0; i < layers(p); ++i) {
      const std::string path = published_path(p, i);
      auto component = file.pairs.find(p.model);
      if (component == file.pairs.end() || !component->second.contains(path)) {
        if (is_down) missing.push_back(p.model + "/" + path);
        continue;
      }
      const LoraPair& pair = component->second.at(path);
      // Files of kohya hold alpha in f32.
      const bool same_alpha = !pair.alpha_in_file || static_cast<float>(pair.alpha) == static_cast<float>(config.alpha);
      check(pair.rank() == config.rank && same_alpha, Code::invalid_config,
            "lora_init '{}': {} of {} has rank {} and alpha {}, this run has lora_rank {} and lora_alpha {}", file.name,
            path, p.model, pair.rank(), pair.alpha, config.rank, config.alpha);
      const HostArray given = (is_down ? pair.down : pair.up).cast(DType::f32);
      check(given.dims() == layer_dims(p), Code::io, "lora_init '{}': {} of {} is {}, expected {}", file.name, path,
            p.model, to_string(given.dims()), to_string(layer_dims(p)));
      std::memcpy(all.mutable_data() + static_cast<size_t>(i) * bytes, given.data(), bytes);
      left[p.model].erase(path);
    }
    out[p.input] = all;
  }
  for (const auto& [component, pairs] : left)
    for (const auto& [path, pair] : pairs) unused.push_back(component + "/" + path);
  if (missing.empty() && unused.empty()) return out;
  Error e(Code::io, fmt::format("lora_init '{}': {} trained weights are not in it, {} of its weights are not trained",
                                file.name, missing.size(), unused.size()));
  if (!missing.empty()) e.note(fmt::format("not in it: {}", fmt::join(missing, ", ")));
  if (!unused.empty()) e.note(fmt::format("not trained: {}", fmt::join(unused, ", ")));
  throw e.note("try: lora_target_modules that name the modules of the file");
}

LoraFile trained_lora(const ParamTable& params, const HostArrays& values, const LoraConfig& config) {
  LoraFile out{.name = "the trained model"};
  for (const Param& p : params.params()) {
    if (!is_lora(p)) continue;
    const HostArray& all = values.at(p.input);
    const Shape one{all.dtype(), layer_dims(p)};
    for (int64_t i = 0; i < layers(p); ++i) {
      LoraPair& pair = out.pairs[p.model][published_path(p, i)];
      (p.path.ends_with(kDown) ? pair.down : pair.up) = HostArray(one, all.owner(), all.data() + i * one.bytes());
      pair.alpha = config.alpha;
    }
  }
  return out;
}

}  // namespace md
