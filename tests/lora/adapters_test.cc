// Adapters of every kind against PEFT and LyCORIS (tools/golden/adapters.py): results, gradients and a few steps of
// training of a linear layer and a convolution, what the packages' files do to weights, and what is written.
#include <fmt/core.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <set>

#include "maxdiffusion/base/files.h"
#include "maxdiffusion/base/host_array_rows.h"
#include "maxdiffusion/base/parse_json.h"
#include "maxdiffusion/base/temporary_folder.h"
#include "maxdiffusion/checkpoint/safetensors.h"
#include "maxdiffusion/lora/lora_keys.h"
#include "maxdiffusion/lora/lora_merge.h"
#include "maxdiffusion/lora/lora_scope.h"
#include "maxdiffusion/nn/layers.h"
#include "tests/lora/models.h"

namespace md {
namespace {

using nlohmann::json;

bool contains(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

NamedTensors two_layers(const Scope& s, NamedTensors& in) {
  return {{"lin", nn::linear(s / "lin", in.at("x"), {.out = 10, .bias = false})},
          {"conv", nn::conv2d(s / "conv", in.at("image"), {.out = 8, .kernel = 3, .padding = 1})}};
}

const json& about() {
  static const json all = parse_json(read_file(golden_path("lora/adapters.json")));
  return all;
}
const HostArrays& recorded() {
  static const HostArrays all = SafetensorsReader::open(golden_path("lora/adapters.safetensors")).tensors();
  return all;
}
/// Those whose names begin so, without it.
HostArrays recorded(const std::string& beginning) {
  HostArrays out;
  for (const auto& [name, array] : recorded())
    if (name.starts_with(beginning)) out[name.substr(beginning.size())] = array;
  return out;
}

/// The layers with an adapter as `config` says, their table and values.
struct Layers {
  LoraConfig config;
  Graph graph;
  ParamTable params;
  HostArrays base = recorded("weights/");  // by path

  explicit Layers(LoraConfig c, const ScopeOptions& options = {}) : config(std::move(c)) {
    NamedTensors inputs;
    for (const auto& [name, a] : recorded("in/")) inputs[name] = graph.input(name, channels(a).shape());
    two_layers(lora_scope(Scope(graph, params, "unet", options), config), inputs);
  }
  static HostArray channels(const HostArray& a) { return a.dims().size() == 4 ? channels_last(a) : a; }

  Forward forward() const {
    return [c = config](const Scope& s, const json&, NamedTensors& in) { return two_layers(lora_scope(s, c), in); };
  }
  /// Values of the adapter by path.
  ModelRun run(const HostArrays& adapter) const {
    ModelCase c{.weights = base};
    c.weights.insert(adapter.begin(), adapter.end());
    for (const auto& [name, a] : recorded("in/")) c.inputs[name] = channels(a);
    for (const auto& [name, a] : recorded("dot/")) c.dots[name] = channels(a);
    c.outputs = c.dots;
    ModelRun r = run_case(c, forward());
    std::erase_if(r.grads, [](const auto& g) { return !adapter_path(g.first); });
    return r;
  }
  HostArrays by_input(const HostArrays& adapter) const {
    HostArrays out;
    for (const auto& [path, a] : base) out["unet/" + path] = a;
    for (const auto& [path, a] : adapter) out["unet/" + path] = a;
    return out;
  }
  LoraFile file(const HostArrays& adapter) const { return trained_lora(params, by_input(adapter), config); }
  /// The weights with files merged, by path.
  HostArrays merged(const std::vector<ScaledLora>& files) const {
    HostArrays values = by_input({}), out;
    merge_loras(files, base_params(params), values);
    for (const auto& [input, a] : values) out[input.substr(5)] = a;
    return out;
  }
};

struct Case {
  std::string name;
  const json& info() const { return about().at("cases").at(name); }
  bool of_peft() const { return name.starts_with("peft"); }
  LoraConfig config() const {
    const json& o = info().at("options");
    LoraConfig c{.targets = {"lin", "conv"}};
    const std::string type = o.value("peft_type", "");
    std::string kind = o.value("use_dora", false) ? "dora" : "lora";
    for (const char* word : {"full", "loha", "lokr", "ia3"})
      if (contains(name, std::string("_") + word)) kind = word;
    c.kind = &adapter_named(kind);
    c.rank = o.value("r", o.value("lora_dim", int64_t{4}));
    c.alpha = o.value("lora_alpha", o.value("alpha", 1.0));
    c.rank_stabilized = o.value("use_rslora", o.value("rs_lora", false));
    const json ranks = o.value("rank_pattern", json::object()), alphas = o.value("alpha_pattern", json::object());
    for (const auto& [key, value] : ranks.items()) c.ranks.emplace_back(LayerPattern(key), value.get<int64_t>());
    for (const auto& [key, value] : alphas.items()) c.alphas.emplace_back(LayerPattern(key), value.get<double>());
    c.factor = o.value("decompose_factor", int64_t{-1});
    c.decompose_both = o.value("decompose_both", false);
    const json scaled = o.value("feedforward_modules", json::array());
    for (const json& layer : scaled) c.input_scaled.push_back(layer);
    if (o.value("train_on_input", false)) c.input_scaled = {"lin", "conv"};
    return c;
  }
  /// Recorded values under our names, in the table's sizes. What LyCORIS' ia3 holds is the difference from `one`.
  HostArrays values(const std::string& what, const Layers& layers, double one = 1) const {
    HostArrays out;
    for (const auto& [name_there, a] : recorded(name + "/" + what + "/")) {
      std::string path = name_there;
      const size_t dot = path.find('.');
      const bool is_ia3 = !of_peft() && layers.config.kind->name() == "ia3";
      if (!of_peft())
        for (const auto& part : layers.config.kind->names())
          if (path.substr(dot + 1) == part.lycoris || (path.ends_with(".weight") && part.name == std::string("diff")))
            path = path.substr(0, dot + 1) + part.name;
      const Param* p = layers.params.find("unet/" + path);
      EXPECT_TRUE(p) << name << ": " << path;
      if (!p) continue;
      HostArray value = a.reshaped(p->shape.dims);
      if (is_ia3) {
        HostArray factors(value.shape());
        std::ranges::transform(value.view<float>(), factors.mutable_view<float>().begin(),
                               [one](float v) { return static_cast<float>(v + one); });
        value = factors;
      }
      out[path] = value;
    }
    return out;
  }
  /// Writes the package's file.
  std::string write(const TemporaryFolder& folder) const {
    std::string path = folder / (of_peft() ? "adapter_model.safetensors" : "lycoris.safetensors");
    if (of_peft()) write_file_atomic(folder / "adapter_config.json", info().at("options").dump());
    write_safetensors(path, recorded(name + "/file/"));
    return path;
  }
};
void PrintTo(const Case& c, std::ostream* os) { *os << c.name; }

std::vector<Case> cases(bool trained) {
  std::vector<Case> out;
  for (const auto& [name, info] : about().at("cases").items())
    if (!trained || info.at("trains").get<bool>()) out.push_back({name});
  return out;
}
std::string name_of(const testing::TestParamInfo<Case>& i) { return i.param.name; }

class AdapterTraining : public testing::TestWithParam<Case> {};

TEST_P(AdapterTraining, GivesTheResultsGradientsAndStepsOfThePackage) {
  const Layers layers(GetParam().config());
  HostArrays values = GetParam().values("value", layers);
  HostArrays outputs;
  for (const auto& [name, a] : recorded(GetParam().name + "/out/")) outputs[name] = Layers::channels(a);
  double worst = 0;
  for (int64_t step = 0; step < about().at("steps").get<int64_t>(); ++step) {
    const ModelRun r = layers.run(values);
    if (step == 0) {
      const Distance out = distance(r.outputs, outputs),
                     grads = distance(r.grads, GetParam().values("grad", layers, 0));
      EXPECT_LE(out.value, 1e-6) << out.name;
      EXPECT_LE(grads.value, 1e-5) << grads.name;
      worst = std::max(out.value, grads.value);
    }
    for (auto& [path, a] : values) {
      HostArray next = copy_of(a);
      const HostArray g = r.grads.at(path);
      for (size_t i = 0; i < next.view<float>().size(); ++i)
        next.mutable_view<float>()[i] -= about().at("rate").get<float>() * g.view<float>()[i];
      a = next;
    }
  }
  const Distance after = distance(values, GetParam().values("after", layers));
  fmt::print("  outputs and gradients {:.2g}, after the steps {:.2g}\n", worst, after.value);
  EXPECT_LE(after.value, 1e-5) << after.name;
}
INSTANTIATE_TEST_SUITE_P(Packages, AdapterTraining, testing::ValuesIn(cases(true)), name_of);

class AdapterFiles : public testing::TestWithParam<Case> {};

TEST_P(AdapterFiles, OfThePackageChangeWeightsAsItDoes) {
  const Layers layers(GetParam().config());
  const TemporaryFolder folder;
  const LoraFile file = read_lora(GetParam().write(folder), LoraTargets(base_params(layers.params), kUnet));
  HostArrays merged = layers.merged({{file, 1}});
  const HostArrays wanted = recorded(GetParam().name + "/merged/");
  std::erase_if(merged, [&](const auto& m) { return !wanted.contains(m.first); });
  const Distance d = distance(merged, wanted);
  fmt::print("  {:.2g}\n", d.value);
  EXPECT_LE(d.value, 1e-6) << d.name;
  EXPECT_GT(distance(merged, layers.base).value, 1e-2);
}
INSTANTIATE_TEST_SUITE_P(Packages, AdapterFiles, testing::ValuesIn(cases(false)), name_of);

class WrittenAdapters : public testing::TestWithParam<Case> {};

TEST_P(WrittenAdapters, HaveThePackagesNamesAndSizesAndReadBack) {
  const Layers layers(GetParam().config());
  const LoraFile trained = layers.file(GetParam().values("value", layers));
  const HostArrays wanted = layers.merged({{trained, 1}});
  const TemporaryFolder folder;
  const std::string kohya = folder / "kohya.safetensors", comfyui = folder / "comfyui.safetensors";
  write_kohya_lora(kohya, trained, kUnet, false);
  write_comfyui_lora(comfyui, trained, kUnet);
  std::vector<std::string> files = {kohya, comfyui};
  const std::string diffusers = write_peft_lora(folder.path(), trained, kUnet);
  const std::string kind(layers.config.kind->name());
  EXPECT_EQ(diffusers.empty(), kind == "loha" || kind == "ia3" || kind == "full");
  if (!diffusers.empty()) files.push_back(diffusers);
  write_peft_folders(folder.path(), trained);
  const std::string peft = folder / "peft/unet/adapter_model.safetensors";
  const bool has_folder = kind == "loha" || kind == "lokr" || GetParam().name == "peft_ia3" ||
                          GetParam().name == "lycoris_ia3_in";  // PEFT scales the convolution's bias, too
  EXPECT_EQ(exists(peft), has_folder);
  if (exists(peft)) files.push_back(peft);
  const LoraTargets targets(base_params(layers.params), kUnet);
  for (const std::string& file : files)
    EXPECT_LE(distance(layers.merged({{read_lora(file, targets), 1}}), wanted).value, 1e-7) << file;

  // Names and sizes are those of the package's own file.
  const std::string mine = GetParam().of_peft() ? (has_folder ? peft : diffusers) : kohya;
  HostArrays found = SafetensorsReader::open(mine).tensors(), theirs = recorded(GetParam().name + "/file/");
  const std::string beginning = !GetParam().of_peft() || has_folder ? "" : "unet.";
  for (const auto& [key, a] : theirs) {
    const std::string root = "base_model.model.";
    const std::string name = beginning.empty() ? key : beginning + key.substr(root.size());
    ASSERT_TRUE(found.contains(name)) << name;
    EXPECT_EQ(found.at(name).shape().elements(), a.shape().elements()) << name;
    if (!name.ends_with(".alpha")) {
      EXPECT_EQ(found.at(name).dims(), a.dims()) << name;
    }
    found.erase(name);
  }
  for (const auto& [key, a] : found) ADD_FAILURE() << key << " is not in the package's file";
}
INSTANTIATE_TEST_SUITE_P(Packages, WrittenAdapters, testing::ValuesIn(cases(true)), name_of);

class EveryAdapter : public testing::TestWithParam<std::string> {
 protected:
  LoraConfig config() const {
    return {.rank = 2, .alpha = 2, .targets = {"lin", "conv"}, .kind = &adapter_named(GetParam())};
  }
  /// Initial values by path.
  static HostArrays initial(const Layers& layers) {
    HostArrays all = initial_lora(layers.params, 5), out;
    all.merge(
        initial_magnitudes(layers.params, [&](const std::string& input) { return layers.base.at(input.substr(5)); }));
    for (const auto& [input, a] : all) out[input.substr(5)] = a;
    return out;
  }
};

TEST_P(EveryAdapter, StartsAtTheBaseModelAndHasGradients) {
  const Layers layers(config());
  for (const Param& p : layers.params.params()) {
    EXPECT_EQ(p.trainable, is_lora(p)) << p.path;
    EXPECT_EQ(p.shape.dtype, DType::f32) << p.path;
  }
  const HostArrays values = initial(layers);
  const LoraFile file = layers.file(values);
  EXPECT_LE(distance(layers.merged({{file, 1}}), layers.base).value, 1e-6);
  const ModelRun r = layers.run(values);
  ModelCase plain{.weights = layers.base};
  for (const auto& [name, a] : recorded("in/")) plain.inputs[name] = Layers::channels(a);
  for (const auto& [name, a] : recorded("dot/")) plain.dots[name] = Layers::channels(a);
  plain.outputs = plain.dots;
  const ModelRun base =
      run_case(plain, [](const Scope& s, const json&, NamedTensors& in) { return two_layers(s, in); });
  EXPECT_LE(distance(r.outputs, base.outputs).value, 1e-6);
  double gradients = 0;
  for (const auto& [path, g] : r.grads)
    for (double v : g.to_doubles()) gradients = std::max(gradients, std::abs(v));
  EXPECT_GT(gradients, 0) << "nothing would be learned";
}

TEST_P(EveryAdapter, TakesValuesFromAFileAndGivesThemBack) {
  const Layers layers(config());
  HostArrays values = initial(layers);
  for (auto& [path, a] : values) {  // away from the start
    HostArray moved = copy_of(a);
    for (float& v : moved.mutable_view<float>()) v += 0.125f;
    a = moved;
  }
  const TemporaryFolder folder;
  write_kohya_lora(folder / "kohya.safetensors", layers.file(values), kUnet, false);
  const LoraFile read = read_lora(folder / "kohya.safetensors", LoraTargets(layers.params, kUnet));
  if (GetParam() == "full") return;  // a file of differences may be of any kind
  for (const auto& [input, a] : initial_lora(layers.params, read, layers.config))
    EXPECT_LE(distance({{"v", a}}, {{"v", values.at(input.substr(5))}}).value, 1e-6) << input;
  LoraConfig other = layers.config;
  other.kind = &adapter_named(GetParam() == "loha" ? "dora" : "loha");
  const Layers others(other);
  EXPECT_TRUE(contains(message_of([&] { initial_lora(others.params, read, other); }), "of adapter=" + GetParam()));
}
INSTANTIATE_TEST_SUITE_P(Kinds, EveryAdapter, testing::ValuesIn(adapter_names()),
                         [](const auto& i) { return i.param; });

TEST(Adapters, OfSeveralKindsAddUpWithTheirScalesInAnyOrder) {
  const Layers layers(LoraConfig{.targets = {"lin", "conv"}});
  const LoraTargets targets(base_params(layers.params), kUnet);
  std::vector<ScaledLora> files;
  HostArrays sums;
  for (const auto& [path, a] : layers.base) sums[path] = copy_of(a);
  double scale = 0.5;
  for (const char* name : {"peft_dora", "lycoris_loha", "peft_lokr", "lycoris_ia3", "lycoris_full"}) {
    const TemporaryFolder folder;
    files.push_back({read_lora(Case{name}.write(folder), targets), scale});
    for (const auto& [path, a] : recorded(std::string(name) + "/merged/")) {
      auto to = sums.at(path).mutable_view<float>();
      for (size_t i = 0; i < to.size(); ++i)
        to[i] += static_cast<float>(scale) * (a.view<float>()[i] - layers.base.at(path).view<float>()[i]);
    }
    scale -= 0.2;
  }
  const HostArrays merged = layers.merged(files);
  EXPECT_LE(distance(merged, sums).value, 1e-6);
  std::ranges::reverse(files);
  EXPECT_LE(distance(layers.merged(files), merged).value, 1e-6);
  for (ScaledLora& f : files) f.scale = 0;
  EXPECT_EQ(distance(layers.merged(files), layers.base).value, 0);
}

TEST(Adapters, OfAnotherSizeAreRefusedByName) {
  const Layers layers(LoraConfig{.targets = {"lin", "conv"}});
  const LoraTargets targets(base_params(layers.params), kUnet);
  const TemporaryFolder folder;
  const auto refusal = [&](const char* name, const std::string& key, const Dims& dims) {
    HostArrays arrays = recorded(std::string(name) + "/file/");
    arrays[key] = zeros_like(HostArray(Shape{DType::f32, dims}));
    write_safetensors(folder / "changed.safetensors", arrays);
    return message_of([&] { read_lora(folder / "changed.safetensors", targets); });
  };
  EXPECT_TRUE(contains(refusal("lycoris_loha", "lora_unet_lin.hada_w1_a", {9, 2}), "LoHa for lin.weight"));
  EXPECT_TRUE(contains(refusal("lycoris_lokr", "lora_unet_lin.lokr_w1", {3, 3}), "LoKr for lin.weight"));
  EXPECT_TRUE(contains(refusal("lycoris_dora", "lora_unet_lin.dora_scale", {3, 1}), "DoRA for lin.weight"));
  EXPECT_TRUE(contains(refusal("lycoris_ia3", "lora_unet_lin.weight", {3}), "IA³ for lin.weight"));
  EXPECT_TRUE(contains(refusal("lycoris_core", "lora_unet_conv.lora_mid.weight", {2, 3, 3, 3}), "core tensor is"));
  EXPECT_TRUE(contains(refusal("lycoris_loha", "lora_unet_conv.hada_t1", {2, 2, 3, 3}), "LoHa with a core tensor"));
}

LoraConfig from_keys(const std::vector<std::string>& words) {
  LoraKeys keys;
  for (const std::string& w : words) {
    const auto value = w.substr(w.find('=') + 1);
    if (w.starts_with("adapter=")) keys.adapter = value;
    if (w.starts_with("rank_pattern=")) keys.rank_pattern = {{value, "3"}};
    if (w.starts_with("bad_pattern=")) keys.rank_pattern = {{value, "0"}};
    if (w.starts_with("alpha_pattern=")) keys.alpha_pattern = {{value, "1.5"}};
    if (w.starts_with("conv_dim=")) keys.conv_dim = std::stoll(value);
    if (w.starts_with("conv_alpha=")) keys.conv_alpha = std::stod(value);
    if (w.starts_with("use_rslora=")) keys.use_rslora = value == "true";
    if (w.starts_with("lora_dropout=")) keys.lora_dropout = std::stod(value);
    if (w.starts_with("decompose_both=")) keys.decompose_both = true;
    if (w.starts_with("decompose_factor=")) keys.decompose_factor = std::stoll(value);
    if (w.starts_with("feedforward_modules=")) keys.feedforward_modules = {value};
  }
  return training_lora(keys, {"to_q"});
}

TEST(AdapterKeys, SayRankAndAlphaOfEachLayer) {
  const LoraConfig c =
      from_keys({"rank_pattern=to_[qk]", "alpha_pattern=^a.to_q", "conv_dim=8", "conv_alpha=2", "use_rslora=true"});
  const Dims matrix = {6, 6}, window = {6, 6, 3, 3}, point = {6, 6, 1, 1};
  EXPECT_EQ(c.strength("a.to_q", matrix).rank, 3);
  EXPECT_EQ(c.strength("a.to_v", matrix).rank, 4);
  EXPECT_DOUBLE_EQ(c.strength("a.to_q", matrix).alpha, 1.5 * std::sqrt(3));
  EXPECT_DOUBLE_EQ(c.strength("b.to_q", matrix).alpha, 4 * std::sqrt(3));
  EXPECT_EQ(c.strength("resnets.0.conv1", window).rank, 8);
  EXPECT_DOUBLE_EQ(c.strength("resnets.0.conv1", window).alpha, 2 * std::sqrt(8));
  EXPECT_EQ(c.strength("resnets.0.conv_shortcut", point).rank, 4);
  for (const char* layer : {"down_blocks.0.resnets.0.conv1", "up.upsamplers.0.conv", "downsamplers.0.conv", "a.to_q"})
    EXPECT_TRUE(c.is_target(layer)) << layer;
  EXPECT_FALSE(c.is_target("conv_in"));
  EXPECT_FALSE(from_keys({}).is_target("down_blocks.0.resnets.0.conv1"));
}

TEST(AdapterKeys, ThatAKindDoesNotReadAreRefused) {
  for (const auto& [words, message] : std::vector<std::pair<std::vector<std::string>, std::string>>{
           {{"adapter=lora", "bad_pattern=to_q"}, "rank_pattern: 'to_q' is 0; expected a whole number above 0"},
           {{"rank_pattern=to_(q"}, "rank_pattern: 'to_(q' is no regular expression"},
           {{"adapter=ia3", "lora_dropout=0.1"}, "lora_dropout cannot be combined with adapter=ia3"},
           {{"adapter=ia3", "conv_dim=2"}, "conv_dim cannot be combined with adapter=ia3"},
           {{"adapter=full", "use_rslora=true"}, "use_rslora cannot be combined with adapter=full"},
           {{"adapter=loha", "decompose_both=true"}, "decompose_both cannot be combined with adapter=loha"},
           {{"adapter=lokr", "decompose_factor=0"}, "decompose_factor is 0; expected -1 or 1 and more"},
           {{"adapter=lora", "feedforward_modules=ff"}, "feedforward_modules cannot be combined with adapter=lora"},
           {{"conv_alpha=2"}, "conv_alpha is 2; expected conv_dim, too"},
           {{"adapter=lycoris"}, "adapter is 'lycoris'; expected one of: lora, dora, loha, lokr, ia3, full"}})
    EXPECT_TRUE(contains(message_of([&, &w = words] { from_keys(w); }), message))
        << message_of([&, &w = words] { from_keys(w); });
}

TEST(AdapterKeys, WithoutALayerAreRefused) {
  LoraConfig c{.targets = {"lin"}};
  const auto refusal = [&] {
    const Layers layers(c);
    return message_of([&] { check_lora_targets(c.targets, c, layers.params); });
  };
  EXPECT_EQ(refusal(), "no error");
  c.ranks = {{LayerPattern("to_q"), 2}};
  EXPECT_TRUE(contains(refusal(), "rank_pattern: 'to_q' matches none of 1 trained layers; expected as in lin"));
  c.ranks.clear();
  c.conv_rank = 2;
  EXPECT_TRUE(contains(refusal(), "conv_dim is 2, and no trained layer is a convolution"));
  c.conv_rank = 0;
  c.kind = &adapter_named("ia3");
  c.input_scaled = {"conv"};
  EXPECT_TRUE(contains(refusal(), "feedforward_modules: 'conv'"));
}

/// The layers' results with dropout, from a seed of random numbers.
HostArrays dropped(const LoraConfig& config, uint64_t seed) {
  const Layers layers(config);
  HostArrays values;
  for (const Param& p : layers.params.params())
    if (is_lora(p)) {
      HostArray a(p.shape);
      for (size_t i = 0; i < a.view<float>().size(); ++i)
        a.mutable_view<float>()[i] = 0.5f + 0.25f * std::sin(static_cast<float>(i));
      values[p.path] = a;
    }
  ModelCase c{.weights = layers.base};
  c.weights.insert(values.begin(), values.end());
  for (const auto& [name, a] : recorded("in/")) c.inputs[name] = Layers::channels(a);
  for (const auto& [name, a] : recorded("dot/")) c.dots[name] = Layers::channels(a);
  c.outputs = c.dots;
  return run_case(c,
                  [config, seed](const Scope& s, const json&, NamedTensors& in) {
                    const Scope with = seed == 0 ? s : s.with_random(Rng::seed(s.graph(), seed));
                    return two_layers(lora_scope(with, config), in);
                  })
      .outputs;
}

TEST(AdapterDropout, DropsInTrainingAloneAndByTheSeed) {
  for (const std::string& kind : adapter_names()) {
    SCOPED_TRACE(kind);
    LoraConfig c{.rank = 2, .alpha = 2, .targets = {"lin", "conv"}, .kind = &adapter_named(kind)};
    const HostArrays plain = dropped(c, 1);
    const auto differs = [&](const LoraConfig& config, uint64_t seed) {
      return distance(dropped(config, seed), plain).value;
    };
    for (double LoraConfig::*key : {&LoraConfig::input_dropout, &LoraConfig::rank_dropout}) {
      if (key == &LoraConfig::input_dropout ? !c.kind->drops_input() : !c.kind->drops_rank()) continue;
      LoraConfig some = c;
      some.*key = 0.5;
      const HostArrays one = dropped(some, 1);
      if (kind == "lora" || kind == "loha") {
        EXPECT_EQ(differs(some, 0), 0) << "without random numbers nothing is dropped";
      }
      EXPECT_GT(distance(one, plain).value, 1e-3);
      EXPECT_GT(distance(dropped(some, 2), one).value, 1e-3);
    }
    // A module is there or not: with 8 seeds of probability 1/2 both happen.
    LoraConfig module = c;
    module.module_dropout = 0.5;
    LoraConfig none = c;
    none.targets = {};
    const HostArrays base = dropped(none, 1);
    std::set<bool> states;
    for (uint64_t seed = 1; seed <= 8 && states.size() < 2; ++seed) {
      const HostArrays out = dropped(module, seed);
      const double with = distance({{"lin", out.at("lin")}}, {{"lin", plain.at("lin")}}).value,
                   without = distance({{"lin", out.at("lin")}}, {{"lin", base.at("lin")}}).value;
      EXPECT_TRUE(with < 1e-6 || without < 1e-6) << with << ", " << without;
      states.insert(with < 1e-6);
    }
    EXPECT_EQ(states.size(), 2u);
  }
}

}  // namespace
}  // namespace md
