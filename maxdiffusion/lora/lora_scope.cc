#include "maxdiffusion/lora/lora_scope.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <set>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/base/host_array_rows.h"
#include "maxdiffusion/nn/layers.h"
#include "maxdiffusion/ops/elementwise.h"
#include "maxdiffusion/ops/shape.h"

namespace md {
namespace {

bool is_named(const std::string& path, const std::string& target) {
  return path == target || path.ends_with("." + target);
}

bool is_any_of(const std::string& path, const std::vector<std::string>& targets) {
  return std::ranges::any_of(targets, [&](const std::string& t) { return is_named(path, t); });
}

/// Layers of the blocks that kohya's LoCon adds with conv_dim.
bool is_in_convolution_block(const std::string& path) {
  return std::ranges::any_of(std::array{"resnets.", "downsamplers.", "upsamplers."}, [&](const std::string& block) {
    return path.starts_with(block) || path.find("." + block) != std::string::npos;
  });
}

bool is_window(const Dims& dims) {
  return std::any_of(dims.begin() + std::min<long>(2, std::ssize(dims)), dims.end(), [](int64_t n) { return n > 1; });
}

template <class T>
T first_match(const std::vector<std::pair<LayerPattern, T>>& patterns, const std::string& module, T otherwise) {
  for (const auto& [pattern, value] : patterns)
    if (pattern.matches(module)) return value;
  return otherwise;
}

/// Of a stacked layer, the first.
std::string one_layer(const std::string& path) { return is_stacked(path) ? layer_path(path, 0) : path; }

/// Ones with probability 1 − p, f32. `of_batch`: axis 0 is the batch's.
Tensor retained(const Scope& s, const char* what, double p, Dims dims, bool of_batch) {
  const Rng random = s.random()->for_(s.path()).for_(what);
  const Tensor uniform = random_uniform(of_batch ? random : Rng(random.key()), {DType::f32, std::move(dims)});
  return named(cast(ge(uniform, full_like(uniform, p)), DType::f32), nn::kDropout);
}

Tensor times(Tensor x, Tensor mask, const Axes& axes) {
  return x * cast(broadcast_in_dim(mask, x.dims(), axes), x.dtype());
}

Tensor adapted(const LoraConfig& c, const Scope& before, const Weight& w, Tensor x, const Product& f) {
  if (w.name != "weight" || !c.is_target(before.path())) return before.product(w, x, f);
  ScopeOptions options = before.options();
  options.trainable = true;
  options.weights = DType::f32;
  const Scope trained = before.with(options);

  const std::string module = one_layer(before.path());
  const LoraStrength strength = c.strength(module, w.dims);
  const std::vector<AdapterPart> parts = c.kind->parts({.dims = w.dims,
                                                        .axes = w.axes,
                                                        .rank = strength.rank,
                                                        .factor = c.factor,
                                                        .decompose_both = c.decompose_both,
                                                        .on_input = is_any_of(before.path(), c.input_scaled)});
  PartDims dims;
  for (const AdapterPart& part : parts) dims[part.name] = part.dims;
  const int64_t rank = c.kind->rank(dims);
  const auto same = [](Tensor t) { return t; };
  AdapterCall call{.before = before,
                   .weight = w,
                   .x = x,
                   .f = f,
                   .scale = rank == 0 ? 1 : strength.alpha / static_cast<double>(rank),
                   .parts =
                       [&] {
                         std::map<std::string, Tensor> made;
                         for (const AdapterPart& part : parts)
                           made[part.name] = trained.param(part.name, part.dims, part.axes, part.init);
                         return made;
                       },
                   .drop_input = same,
                   .drop_rank = same,
                   .drop_rows = same,
                   .drop_module = [](Tensor with, Tensor) { return with; }};
  if (before.random() && c.input_dropout > 0)
    call.drop_input = [&](Tensor t) {
      const Tensor mask = retained(before, "input", c.input_dropout, t.dims(), true);
      return t * cast(mask / (1 - c.input_dropout), t.dtype());
    };
  if (before.random() && c.rank_dropout > 0) {
    call.drop_rank = [&](Tensor h) {
      const Tensor mask = retained(before, "rank", c.rank_dropout, {h.dim(0), h.dim(-1)}, true);
      return times(h, mask / (1 - c.rank_dropout), {0, h.rank() - 1});
    };
    call.drop_rows = [&](Tensor d) {
      return times(d, retained(before, "rank", c.rank_dropout, {d.dim(0)}, false), {0});
    };
  }
  if (before.random() && c.module_dropout > 0)
    call.drop_module = [&](Tensor with, Tensor without) {
      const Tensor mask = retained(before, "module", c.module_dropout, {}, false);
      return where(broadcast_in_dim(gt(mask, zeros_like(mask)), with.dims(), {}), with, without);
    };
  return c.kind->forward(call);
}

/// Layers of a stacked parameter, or the one of another.
int64_t layers(const Param& p) { return std::max<int64_t>(p.stacked, 1); }
/// "….to_q.weight" for "….to_q.lora_A.weight".
std::string published_path(const Param& p, int64_t layer) {
  const std::string path = adapter_path(p.path).layer + ".weight";
  return p.stacked > 0 ? layer_path(path, layer) : path;
}
Dims layer_dims(const Param& p) { return Dims(p.shape.dims.begin() + (p.stacked > 0), p.shape.dims.end()); }

std::string module_of_weight(const std::string& path) {
  return path.substr(0, path.size() - std::string(".weight").size());
}

/// A trained value as AdapterWeights holds it, for a weight of `rank` axes.
HostArray as_stored(const std::string& part, const HostArray& value, size_t rank) {
  if (part != kMagnitude) return value;
  Dims dims(rank, 1);
  dims[0] = value.shape().elements();
  return value.reshaped(dims);
}

/// Weights of every layer in the table: component → published path → dims.
std::map<std::string, std::map<std::string, Dims>> adapted_weights(const ParamTable& params) {
  std::map<std::string, std::map<std::string, Dims>> out;
  std::set<std::pair<std::string, std::string>> wanted;
  for (const Param& p : params.params())
    if (const AdapterPath path = adapter_path(p.path)) wanted.emplace(p.model, path.layer + ".weight");
  for (const Param& p : params.params()) {
    const std::string weight = p.few_bits ? p.few_bits->weight : p.path;
    if (!wanted.contains({p.model, weight}) || (p.few_bits && p.few_bits->which > 0)) continue;
    for (int64_t i = 0; i < layers(p); ++i)
      out[p.model][p.stacked > 0 ? layer_path(weight, i) : weight] = p.few_bits ? p.few_bits->dims : layer_dims(p);
  }
  return out;
}

}  // namespace

bool LoraConfig::is_target(const std::string& module) const {
  return is_any_of(module, targets) || (conv_rank > 0 && is_in_convolution_block(module));
}

LoraStrength LoraConfig::strength(const std::string& module, const Dims& dims) const {
  const bool window = conv_rank > 0 && is_window(dims);
  const int64_t r = first_match(ranks, module, window ? conv_rank : rank);
  const double a = first_match(alphas, module, window ? conv_alpha : alpha);
  return {r, rank_stabilized ? a * std::sqrt(static_cast<double>(r)) : a};
}

Scope lora_scope(const Scope& s, const LoraConfig& config) {
  check(config.rank > 0, Code::invalid_config, "lora_rank {} is not a positive number", config.rank);
  return s.frozen().with_product([config](const Scope& before, const Weight& w, Tensor x, const Product& f) {
    return adapted(config, before, w, x, f);
  });
}

void check_lora_targets(const std::vector<std::string>& targets, const LoraConfig& config, const ParamTable& params) {
  std::vector<std::string> unmatched;
  for (const std::string& t : targets)
    if (std::ranges::none_of(params.params(), [&](const Param& p) {
          const AdapterPath path = adapter_path(p.path);
          return path && is_named(path.layer, t);
        }))
      unmatched.push_back(t);
  if (!unmatched.empty()) {
    Error e(Code::invalid_config, fmt::format("lora_target_modules: no linear or convolution layer is called {}",
                                              fmt::join(unmatched, ", ")));
    e.note("names are ends of module paths, as in to_q, to_out.0, conv1");
    if (std::ranges::any_of(params.params(), [](const Param& p) { return p.stacked > 0; }))
      e.note("with scan_layers '*' is the number of a block");
    throw e;
  }
  bool has_window = false;
  std::set<std::string> modules;
  for (const auto& [component, weights] : adapted_weights(params))
    for (const auto& [path, dims] : weights) {
      has_window |= is_window(dims);
      modules.insert(module_of_weight(path));
    }
  check(config.conv_rank == 0 || has_window, Code::invalid_config,
        "conv_dim is {}, and no trained layer is a convolution larger than one pixel; expected null", config.conv_rank);
  const auto check_used = [&](const char* key, const auto& patterns) {
    for (const auto& [pattern, value] : patterns)
      check(std::ranges::any_of(modules, [&, &p = pattern](const std::string& m) { return p.matches(m); }),
            Code::invalid_config, "{}: '{}' matches none of {} trained layers; expected as in {}", key, pattern.text(),
            modules.size(), modules.empty() ? "" : *modules.begin());
  };
  check_used("rank_pattern", config.ranks);
  check_used("alpha_pattern", config.alphas);
  for (const std::string& t : config.input_scaled)
    check(std::ranges::any_of(modules, [&](const std::string& m) { return is_named(m, t); }), Code::invalid_config,
          "feedforward_modules: '{}' is the end of no trained layer's name; expected as in {}", t,
          modules.empty() ? "" : *modules.begin());
  for (const Param& p : params.params()) {
    const AdapterPath path = adapter_path(p.path);
    if (!path || p.stacked < 2) continue;
    const auto of = [&](int64_t i) { return config.strength(layer_path(path.layer, i), {}); };
    for (int64_t i = 1; i < p.stacked; ++i)
      check(of(i).rank == of(0).rank && of(i).alpha == of(0).alpha, Code::invalid_config,
            "rank_pattern or alpha_pattern gives layers of {} different values, which scan_layers makes one loop: "
            "match all or none, or set "
            "scan_layers to false",
            path.layer);
  }
}

bool is_second_lora_matrix(const Param& p) { return p.path.ends_with(".lora_B.weight"); }

bool is_lora(const Param& p) { return static_cast<bool>(adapter_path(p.path)); }

ParamTable base_params(const ParamTable& params) {
  ParamTable out;
  for (const Param& p : params.params())
    if (!is_lora(p)) out.add(p);
  return out;
}

HostArrays initial_lora(const ParamTable& params, uint64_t seed) {
  HostArrays out;
  for (const Param& p : params.params())
    if (const AdapterPath path = adapter_path(p.path); path && path.part != kMagnitude)
      out[p.input] = initial_value(p, seed);
  return out;
}

HostArrays initial_magnitudes(const ParamTable& params,
                              const std::function<HostArray(const std::string& input)>& value) {
  std::map<std::string, std::map<size_t, const Param*>> stored;  // weight → its arrays
  for (const Param& p : params.params())
    stored[p.model + "/" + (p.few_bits ? p.few_bits->weight : p.path)][p.few_bits ? p.few_bits->which : 0] = &p;
  HostArrays out;
  for (const Param& p : params.params()) {
    const AdapterPath path = adapter_path(p.path);
    if (path.part != kMagnitude) continue;
    const auto& arrays = stored.at(p.model + "/" + path.layer + ".weight");
    const auto& few_bits = arrays.at(0)->few_bits;
    std::vector<HostArray> values;
    for (const auto& [which, array] : arrays) values.push_back(value(array->input));
    HostArray magnitudes(Shape{DType::f32, p.shape.dims});
    const auto to = magnitudes.mutable_view<float>();
    const int64_t of_layer = p.shape.elements() / layers(p);
    for (int64_t layer = 0; layer < layers(p); ++layer) {
      std::vector<HostArray> of_this;
      for (const HostArray& v : values) of_this.push_back(p.stacked > 0 ? row_of(v, layer) : v);
      const HostArray w = few_bits ? widened(few_bits->type, of_this) : of_this[0];
      const int64_t width = w.shape().elements() / of_layer;
      for (int64_t i = 0; i < of_layer; ++i) {
        double squares = 0;
        for (const float v : float_rows(w, width, i, 1)) squares += static_cast<double>(v) * v;
        to[static_cast<size_t>(layer * of_layer + i)] = static_cast<float>(std::sqrt(squares));
      }
    }
    out[p.input] = magnitudes;
  }
  return out;
}

HostArrays initial_lora(const ParamTable& params, const LoraFile& file, const LoraConfig& config) {
  const auto all = file.all();
  for (const auto& [component, weights] : all)
    for (const auto& [path, w] : weights) {
      check(w.kind == config.kind || w.kind != &adapter_named("full"), Code::invalid_config,
            "lora_init '{}': it also holds full-rank differences of weights or biases, which are not trained",
            file.name);
      check(w.kind == config.kind, Code::invalid_config, "lora_init '{}': {} of {} is of adapter={}, this run's is {}",
            file.name, path, component, w.kind->name(), config.kind->name());
    }
  HostArrays out;
  std::vector<std::string> missing, unused;
  auto left = all;
  const auto dims = adapted_weights(params);
  for (const Param& p : params.params()) {
    const AdapterPath adapter = adapter_path(p.path);
    if (!adapter) continue;
    HostArray values(Shape{DType::f32, p.shape.dims});
    const size_t bytes = values.bytes() / static_cast<size_t>(layers(p));
    for (int64_t i = 0; i < layers(p); ++i) {
      const std::string path = published_path(p, i);
      const auto component = all.find(p.model);
      if (component == all.end() || !component->second.contains(path)) {
        const std::string name = p.model + "/" + path;
        if (std::ranges::count(missing, name) == 0) missing.push_back(name);
        continue;
      }
      const AdapterWeights& w = component->second.at(path);
      const LoraStrength strength = config.strength(module_of_weight(path), dims.at(p.model).at(path));
      const int64_t rank = w.kind->rank(w.dims());
      // Files of kohya hold alpha in f32.
      const bool same_alpha =
          !w.alpha_in_file || static_cast<float>(w.alpha) == static_cast<float>(strength.alpha) || rank == 0;
      check((rank == strength.rank || rank == 0) && same_alpha, Code::invalid_config,
            "lora_init '{}': {} of {} has rank {} and alpha {}, this run has lora_rank {} and lora_alpha {}", file.name,
            path, p.model, rank, w.alpha, strength.rank, strength.alpha);
      const auto part = w.parts.find(adapter.part);
      check(part != w.parts.end(), Code::io, "lora_init '{}': {} of {} has no {}; expected {}", file.name, path,
            p.model, adapter.part, to_string(layer_dims(p)));
      HostArray initial = part->second.cast(DType::f32);
      if (adapter.part == kMagnitude && initial.shape().elements() == layer_dims(p)[0])
        initial = initial.reshaped(layer_dims(p));
      check(initial.dims() == layer_dims(p), Code::io, "lora_init '{}': {} of {} is {}, expected {}", file.name, path,
            p.model, to_string(initial.dims()), to_string(layer_dims(p)));
      std::memcpy(values.mutable_data() + static_cast<size_t>(i) * bytes, initial.data(), bytes);
      left[p.model].erase(path);
    }
    out[p.input] = values;
  }
  for (const auto& [component, weights] : left)
    for (const auto& [path, w] : weights) unused.push_back(component + "/" + path);
  if (missing.empty() && unused.empty()) return out;
  Error e(Code::io, fmt::format("lora_init '{}': {} trained weights are not in it, {} of its weights are not trained",
                                file.name, missing.size(), unused.size()));
  if (!missing.empty()) e.note(fmt::format("not in it: {}", fmt::join(missing, ", ")));
  if (!unused.empty()) e.note(fmt::format("not trained: {}", fmt::join(unused, ", ")));
  throw e.note("try: lora_target_modules that name the modules of the file");
}

LoraFile trained_lora(const ParamTable& params, const HostArrays& values, const LoraConfig& config) {
  std::map<std::string, std::map<std::string, AdapterWeights>> all;
  const auto dims = adapted_weights(params);
  std::set<std::string> inputs;
  for (const Param& p : params.params()) inputs.insert(p.input);
  for (const Param& p : params.params()) {
    const AdapterPath adapter = adapter_path(p.path);
    if (!adapter) continue;
    const HostArray& value = values.at(p.input);
    const Shape one{value.dtype(), layer_dims(p)};
    for (int64_t i = 0; i < layers(p); ++i) {
      const std::string path = published_path(p, i);
      const Dims& weight = dims.at(p.model).at(path);
      AdapterWeights& w = all[p.model][path];
      w.kind = config.kind;
      w.parts[adapter.part] =
          as_stored(adapter.part, HostArray(one, value.owner(), value.data() + i * one.bytes()), weight.size());
      w.alpha = config.strength(module_of_weight(path), weight).alpha;
      w.factor = config.factor;
      w.weight_dims = weight;
      w.has_bias = inputs.contains(p.model + "/" + adapter.layer + ".bias");
    }
  }
  LoraFile out{.name = "the trained model"};
  for (auto& [component, weights] : all)
    for (auto& [path, w] : weights) out.add(component, path, std::move(w));
  return out;
}

}  // namespace md
