#include "tests/families/toy_family.h"

#include <algorithm>

#include "maxdiffusion/base/files.h"
#include "maxdiffusion/families/family.h"
#include "maxdiffusion/models/config_reader.h"
#include "maxdiffusion/nn/attention.h"
#include "maxdiffusion/ops/elementwise.h"
#include "maxdiffusion/ops/shape.h"

namespace md {
namespace {

// --- The model -----------------------------------------------------------------------------------------------------

struct ToyConfig {
  int64_t size = 8, patch = 2, width = 32, layers = 2, classes = 3;

  int64_t side() const { return size / patch; }
  static ToyConfig from_json(const nlohmann::json& config) {
    ConfigReader r(config, "ToyTransformer config");
    ToyConfig c;
    c.size = r.get<int64_t>("size", c.size);
    c.patch = r.get<int64_t>("patch", c.patch);
    c.width = r.get<int64_t>("width", c.width);
    c.layers = r.get<int64_t>("layers", c.layers);
    c.classes = r.get<int64_t>("classes", c.classes);
    r.finish();
    return c;
  }
};

/// images [B, S, S, 3] ⇄ patches [B, (S/P)², P·P·3].
Tensor to_patches(const ToyConfig& c, Tensor x) {
  const int64_t b = x.dim(0), n = c.side(), p = c.patch;
  return reshape(transpose(reshape(x, {b, n, p, n, p, 3}), {0, 1, 3, 2, 4, 5}), {b, n * n, p * p * 3});
}
Tensor to_images(const ToyConfig& c, Tensor x) {
  const int64_t b = x.dim(0), n = c.side(), p = c.patch;
  return reshape(transpose(reshape(x, {b, n, n, p, p, 3}), {0, 1, 3, 2, 4, 5}), {b, c.size, c.size, 3});
}

/// x: [B, S, S, 3], t: [B], label: [B] s32 → velocity [B, S, S, 3] f32.
Tensor toy_transformer(const Scope& s, const ToyConfig& c, Tensor x, Tensor t, Tensor label) {
  const int64_t b = x.dim(0), tokens = c.side() * c.side();
  Tensor h = nn::linear(s / "patches", cast(to_patches(c, x), s.dtype()), {.out = c.width});
  h = h + cast(s.param("positions", {1, tokens, c.width}, {"", "", ""}, init::normal(0.1)), h.dtype());
  Tensor time = nn::timestep_mlp(s / "time", cast(nn::timestep_embedding(t, c.width, true, 0), s.dtype()), c.width);
  Tensor kind = nn::embedding(s / "classes", label, c.classes + 1, c.width, init::normal(0.5));
  h = h + reshape(time + kind, {b, 1, c.width});
  h = nn::repeat(s / "blocks", c.layers, h, [&](const Scope& block, Tensor y) {
    Tensor z = nn::layer_norm(block / "norm1", y, 1e-5);
    y = y + nn::multi_head_attention(block / "attention", z, z, {.heads = 2, .annotated = false});
    z = nn::linear(block / "up", nn::layer_norm(block / "norm2", y, 1e-5), {.out = 4 * c.width});
    return y + nn::linear(block / "down", gelu(z), {.out = c.width});
  });
  h = nn::linear(s / "out", nn::layer_norm(s / "norm", h, 1e-5), {.out = c.patch * c.patch * 3});
  return cast(to_images(c, h), DType::f32);
}

void trace_toy(const Scope& s, const ToyConfig& c) {
  Graph& g = s.graph();
  toy_transformer(s, c, full(g, 0, {DType::f32, {1, c.size, c.size, 3}}), full(g, 0, {DType::f32, {1}}),
                  full(g, 0, {DType::s32, {1}}));
}

// --- The family ----------------------------------------------------------------------------------------------------

/// A caption has one token: the number of its class.
class ToyTokenizer final : public Tokenizer {
  std::vector<int32_t> tokens(std::string_view text, int64_t, bool*) const override {
    return {static_cast<int32_t>(std::ranges::find(kToyClasses, text) - kToyClasses.begin())};
  }
  int32_t pad_id() const override { return 0; }
  int32_t end_id() const override { return 0; }
  int64_t size() const override { return std::ssize(kToyClasses) + 1; }
  std::map<std::string, std::string> files() const override { return {}; }
};

class Toy final : public Family {
 public:
  explicit Toy(const ModelFolder& folder)
      : Family({.denoisers = {"transformer"},
                .text_encoders = {{.tokenizer = std::make_shared<ToyTokenizer>(), .ids = "label", .max_tokens = 1}},
                .conditioning = {{"label", {DType::s32, {1}}}},
                .reference = {.names = {"toy", "toy1"}, .types = {"T2I"}}}),
        config_(folder.config<ToyConfig>("transformer")) {}

  Conditioning encode_text(const Models&, const Conditioning& text, int64_t) const override { return text; }
  Tensor predict(const Models& models, Tensor x, Tensor t, const Conditioning& c,
                 const PredictOptions&) const override {
    return toy_transformer(models("transformer"), config_, x, t, reshape(c.at("label"), {x.dim(0)}));
  }
  void check_size(const MediaSize& size) const override {
    check(size.height == config_.size && size.width == config_.size, Code::invalid_config,
          "size {}x{}; this model makes {}x{}", size.height, size.width, config_.size, config_.size);
  }

 private:
  ToyConfig config_;
};

}  // namespace

void add_toy_family() {
  add_model_class(model_class("ToyTransformer", trace_toy));
  add_family({{"ToyPipeline"}, [](const ModelFolder& folder) { return std::make_shared<Toy>(folder); }});
}

void write_toy_folder(const std::string& folder) {
  make_folders(folder + "/transformer");
  make_folders(folder + "/scheduler");
  write_file_atomic(folder + "/model_index.json", R"({"_class_name": "ToyPipeline",
    "scheduler": ["diffusers", "UniPCMultistepScheduler"], "transformer": ["toy", "ToyTransformer"]})");
  write_file_atomic(folder + "/transformer/config.json", R"({"_class_name": "ToyTransformer", "size": 8})");
  write_file_atomic(folder + "/scheduler/scheduler_config.json", R"({"_class_name": "UniPCMultistepScheduler",
    "prediction_type": "flow_prediction", "use_flow_sigmas": true, "flow_shift": 1.0, "num_train_timesteps": 1000})");
}

}  // namespace md
