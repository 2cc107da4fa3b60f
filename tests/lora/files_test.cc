// LoRA files of every layout compared with diffusers and PEFT: tools/golden/lora.py loaded each layout and recorded the
// factor of up·down by which every weight changed.
#include <fmt/core.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstdlib>
#include <filesystem>

#include "maxdiffusion/base/files.h"
#include "maxdiffusion/base/parse_json.h"
#include "maxdiffusion/base/temporary_folder.h"
#include "maxdiffusion/checkpoint/safetensors.h"
#include "maxdiffusion/checkpoint/weights.h"
#include "maxdiffusion/lora/lora_merge.h"
#include "maxdiffusion/models/original_weight_names.h"
#include "tests/lora/models.h"

namespace md {
namespace {

using nlohmann::json;

bool contains(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

/// w + factor · up·down in double, by definition.
std::vector<double> adapted(const HostArray& w, const HostArray& down, const HostArray& up, double factor) {
  std::vector<double> out = w.to_doubles();
  const std::vector<double> a = down.to_doubles(), b = up.to_doubles();
  const size_t rank = static_cast<size_t>(down.dims()[0]), rest = a.size() / rank;
  for (size_t i = 0; i < out.size(); ++i)
    for (size_t r = 0; r < rank; ++r) out[i] += factor * b[i / rest * rank + r] * a[r * rest + i % rest];
  return out;
}

double relative(const HostArray& got, const std::vector<double>& want) {
  const std::vector<double> v = got.to_doubles();
  double difference = 0, norm = 0;
  for (size_t i = 0; i < want.size(); ++i) difference += std::pow(v[i] - want[i], 2), norm += want[i] * want[i];
  return v.size() == want.size() ? std::sqrt(difference / norm) : INFINITY;
}

class LoraLayout : public testing::TestWithParam<Layout> {};
std::string name_of(const testing::TestParamInfo<Layout>& i) { return i.param.which + "_" + i.param.name; }

TEST_P(LoraLayout, ChangesWeightsAsDiffusersDoes) {
  const Layout& layout = GetParam();
  const TemporaryFolder folder;
  const TracedModels models = traced_models(layout.which);
  const LoraFile lora =
      read_lora(write_layout(layout, folder.path()), LoraTargets(models.params, lora_names_of(layout.which)));
  HostArrays values = models.values;
  merge_loras({{lora, 1}}, models.params, values);
  const HostArrays matrices = recorded_matrices(layout.which);
  double worst = 0;
  for (const auto& [input, before] : models.values) {
    if (!layout.factors.contains(input)) {
      EXPECT_EQ(values.at(input).data(), before.data()) << input;
      continue;
    }
    const std::string module = input.substr(0, input.size() - std::string(".weight").size());
    const double d = relative(values.at(input), adapted(before, matrices.at(module + "/down"),
                                                        matrices.at(module + "/up"), layout.factors.at(input)));
    EXPECT_LE(d, 1e-6) << input;
    worst = std::max(worst, d);
  }
  fmt::print("  {} weights changed, distance {:.2g}\n", layout.factors.size(), worst);
}

INSTANTIATE_TEST_SUITE_P(Recorded, LoraLayout, testing::ValuesIn(recorded_layouts()), name_of);

struct LoraFiles : testing::Test {
  TemporaryFolder folder;
  Layout layout = recorded_layout("sdxl", "kohya");
  TracedModels models = traced_models("sdxl");
  LoraTargets targets{models.params, lora_names_of("sdxl")};
  /// The layout's file with some arrays changed.
  using Change = std::function<void(HostArrays&)>;
  std::string changed(const Change& change, const std::map<std::string, std::string>& metadata = {}) {
    HostArrays arrays = SafetensorsReader::open(write_layout(layout, folder.path())).tensors();
    change(arrays);
    std::string path = folder / "changed.safetensors";
    write_safetensors(path, arrays, metadata);
    return path;
  }
  std::string refusal(const Change& change, const std::map<std::string, std::string>& metadata = {}) {
    const std::string path = changed(change, metadata);
    return message_of([&] { read_lora(path, targets); });
  }
};

TEST_F(LoraFiles, MayHoldHalfPrecision) {
  HostArrays single = models.values;
  merge_loras({{read_lora(write_layout(layout, folder.path()), targets), 1}}, models.params, single);
  for (DType dtype : {DType::bf16, DType::f16}) {  // both represent the recorded values exactly
    HostArrays half = models.values;
    merge_loras({{read_lora(write_layout(layout, folder.path(), dtype), targets), 1}}, models.params, half);
    EXPECT_EQ(distance(half, single).value, 0);
  }
}

TEST_F(LoraFiles, MergeIntoStackedParametersAsIntoSingleOnes) {
  const LoraFile lora = read_lora(write_layout(layout, folder.path()), targets);
  merge_loras({{lora, 1}}, models.params, models.values);
  TracedModels stacked = traced_models("sdxl", {.scan_layers = true});
  const LoraFile again = read_lora(folder / "lora.safetensors", LoraTargets(stacked.params, lora_names_of("sdxl")));
  merge_loras({{again, 1}}, stacked.params, stacked.values);
  HostArrays apart;
  for (const auto& [input, array] : stacked.values) apart.merge(unstacked(input, array));
  EXPECT_LT(stacked.values.size(), apart.size());
  EXPECT_EQ(distance(apart, models.values).value, 0);
}

// S4-89
TEST_F(LoraFiles, AddUpWithTheirScalesAndAreRoundedOnce) {
  const LoraFile one = read_lora(write_layout(layout, folder.path()), targets);
  const LoraFile two = read_lora(write_layout(recorded_layout("sdxl", "peft_folder"), folder.path()), targets);
  const std::vector<ScaledLora> both = {{one, 0.5}, {two, -0.25}};
  HostArrays values = models.values;
  merge_loras(both, models.params, values);
  const HostArrays matrices = recorded_matrices("sdxl");
  const json& first = layout.factors;
  const json second = recorded_layout("sdxl", "peft_folder").factors;
  for (const auto& [input, factor] : first.items()) {
    const std::string module = input.substr(0, input.size() - std::string(".weight").size());
    const double sum = 0.5 * factor.get<double>() - 0.25 * second.value(input, 0.0);
    EXPECT_LE(relative(values.at(input), adapted(models.values.at(input), matrices.at(module + "/down"),
                                                 matrices.at(module + "/up"), sum)),
              1e-6)
        << input;
  }
  TracedModels half = traced_models("sdxl", {.weights = DType::bf16});
  merge_loras(both, half.params, half.values);
  for (auto& [input, array] : values) array = array.cast(DType::bf16);
  EXPECT_EQ(half.values.at("unet/conv_in.weight").dtype(), DType::bf16);
  EXPECT_EQ(distance(half.values, values).value, 0);
}

TEST_F(LoraFiles, OfScaleZeroChangeNothing) {
  HostArrays values = models.values;
  merge_loras({{read_lora(write_layout(layout, folder.path()), targets), 0}}, models.params, values);
  EXPECT_EQ(distance(values, models.values).value, 0);
}

TEST_F(LoraFiles, LinearAndOneByOneConvolutionsAreInterchangeable) {
  const LoraFile before = read_lora(write_layout(layout, folder.path()), targets);
  const LoraFile after = read_lora(changed([](HostArrays& arrays) {
                                     for (auto& [key, a] : arrays) {
                                       Dims d = a.dims();
                                       if (contains(key, "conv_shortcut") && d.size() == 4) d.resize(2);
                                       if (contains(key, "proj_in") && d.size() == 2) d.resize(4, 1);
                                       a = a.reshaped(d);
                                     }
                                   }),
                                   targets);
  for (const auto& [path, pair] : before.pairs.at("unet"))
    EXPECT_EQ(after.pairs.at("unet").at(path).down.shape(), pair.down.shape()) << path;
}

TEST_F(LoraFiles, WithoutAlphaOrWithZeroCountOnce) {
  const LoraFile lora =
      read_lora(changed([](HostArrays& arrays) {
                  arrays.erase("lora_unet_conv_in.alpha");
                  const float zero = 0;
                  arrays["lora_unet_conv_out.alpha"] = HostArray::of<float>({DType::f32, {1}}, {&zero, 1});
                }),
                targets);
  EXPECT_EQ(lora.pairs.at("unet").at("conv_in.weight").alpha, 2);
  EXPECT_EQ(lora.pairs.at("unet").at("conv_out.weight").alpha, 2);
  EXPECT_EQ(lora.pairs.at("unet").at("mid_block.resnets.1.conv2.weight").alpha, 3);
}

TEST_F(LoraFiles, HaveAlphaInTheirMetadataUnlessATensorHasIt) {
  for (const char* key : {"lora_alpha", "network_alpha", "ss_network_alpha", "alpha", "unet.lora_alpha"}) {
    const LoraFile lora =
        read_lora(changed([](HostArrays& arrays) { arrays.erase("lora_unet_conv_in.alpha"); }, {{key, "16"}}), targets);
    EXPECT_EQ(lora.pairs.at("unet").at("conv_in.weight").alpha, 16) << key;
    EXPECT_EQ(lora.pairs.at("unet").at("mid_block.resnets.1.conv2.weight").alpha, 3) << key;
  }
  for (const char* none : {"None", "0", "Dynamic"}) {  // the rank
    const LoraFile lora = read_lora(
        changed([](HostArrays& arrays) { arrays.erase("lora_unet_conv_in.alpha"); }, {{"ss_network_alpha", none}}),
        targets);
    EXPECT_EQ(lora.pairs.at("unet").at("conv_in.weight").alpha, 2) << none;
  }
}

TEST_F(LoraFiles, WithAlphaZeroSayWhatItMeans) {
  const auto read = [&](const Change& change, const std::map<std::string, std::string>& metadata) {
    testing::internal::CaptureStderr();
    const LoraFile lora = read_lora(changed(change, metadata), targets);
    return std::pair(lora.pairs.at("unet").at("conv_in.weight").alpha, testing::internal::GetCapturedStderr());
  };
  const std::string key = "lora_unet_conv_in.alpha";
  const auto [of_tensor, of_kohya] = read(
      [&](HostArrays& a) {
        a[key] = HostArray::of<float>({DType::f32, {}}, {{0.0F}});
      },
      {});
  EXPECT_EQ(of_tensor, 2) << "the rank";
  EXPECT_TRUE(contains(of_kohya, "'" + key + "' is 0 and counts as the rank")) << of_kohya;
  const auto [of_metadata, of_peft] =
      read([&](HostArrays& a) { std::erase_if(a, [](const auto& t) { return t.first.ends_with(".alpha"); }); },
           {{"lora_adapter_metadata", R"({"unet.r": 2, "unet.lora_alpha": 0})"}});
  EXPECT_EQ(of_metadata, 0);
  EXPECT_TRUE(contains(of_peft, "its metadata has alpha 0, so that matrices add nothing")) << of_peft;
}

TEST_F(LoraFiles, HoldDifferencesOfNormsAsLycorisNamesThem) {
  const std::vector<float> weight(8, 0.5f), bias(8, -0.25f);
  const LoraFile lora =
      read_lora(changed([&](HostArrays& arrays) {
                  arrays["lora_unet_conv_norm_out.w_norm"] = HostArray::of<float>({DType::f32, {8}}, weight);
                  arrays["lora_unet_conv_norm_out.b_norm"] = HostArray::of<float>({DType::f32, {8}}, bias);
                }),
                targets);
  EXPECT_EQ(lora.differences.at("unet").at("conv_norm_out.weight").to_doubles(), std::vector<double>(8, 0.5));
  EXPECT_EQ(lora.differences.at("unet").at("conv_norm_out.bias").to_doubles(), std::vector<double>(8, -0.25));
}

TEST_F(LoraFiles, WithNamesOfAdaptersAreRead) {
  layout = recorded_layout("sdxl", "peft_plain");
  const LoraFile plain = read_lora(write_layout(layout, folder.path()), targets);
  const LoraFile named = read_lora(changed([](HostArrays& arrays) {
                                     HostArrays other;
                                     for (const auto& [key, a] : arrays)
                                       other[key.substr(0, key.size() - 6) + "default.weight"] = a;
                                     arrays = other;
                                   }),
                                   targets);
  for (const auto& [component, pairs] : plain.pairs) EXPECT_EQ(named.pairs.at(component).size(), pairs.size());
}

// OneTrainer's two layouts with dots, and ComfyUI's names.
TEST_F(LoraFiles, AreReadByTheBeginningsOfEveryProgram) {
  const LoraFile plain = read_lora(write_layout(layout, folder.path()), targets);
  using Beginnings = std::map<std::string, std::string>;
  for (const Beginnings& beginnings :
       {Beginnings{{"lora_unet_", "lora_unet."}, {"lora_te1_", "lora_te1."}, {"lora_te2_", "lora_te2."}},
        Beginnings{{"lora_unet_", "unet."}, {"lora_te1_", "clip_l."}, {"lora_te2_", "clip_g."}},
        Beginnings{{"lora_unet_", "diffusion_model."},
                   {"lora_te1_", "text_encoders.clip_l.transformer."},
                   {"lora_te2_", "text_encoders.clip_g.transformer."}}}) {
    const LoraFile lora = read_lora(changed([&](HostArrays& arrays) {
                                      HostArrays renamed;
                                      for (const auto& [key, a] : arrays)
                                        for (const auto& [from, to] : beginnings)
                                          if (key.starts_with(from)) renamed[to + key.substr(from.size())] = a;
                                      ASSERT_EQ(renamed.size(), arrays.size());
                                      arrays = renamed;
                                    }),
                                    targets);
    for (const auto& [component, pairs] : plain.pairs) {
      ASSERT_EQ(lora.pairs.at(component).size(), pairs.size()) << component;
      for (const auto& [path, pair] : pairs) {
        EXPECT_EQ(lora.pairs.at(component).at(path).up.to_doubles(), pair.up.to_doubles()) << path;
        EXPECT_EQ(lora.pairs.at(component).at(path).alpha, pair.alpha) << path;
      }
    }
  }
}

TEST_F(LoraFiles, MayNameTheAdapterOfMagnitudes) {
  const std::vector<float> ones(8, 1.0F);
  for (const char* end : {"", ".weight", ".default.weight"}) {
    const LoraFile lora = read_lora(changed([&](HostArrays& arrays) {
                                      arrays[std::string("unet.conv_in.lora_magnitude_vector") + end] =
                                          HostArray::of<float>({DType::f32, {8}}, ones);
                                    }),
                                    targets);
    ASSERT_TRUE(lora.adapters.contains("unet")) << end;
    EXPECT_EQ(lora.adapters.at("unet").at("conv_in.weight").kind->name(), "dora") << end;
  }
}

TEST_F(LoraFiles, WithAnAlphaAloneAreReadWithoutIt) {
  testing::internal::CaptureStderr();
  const LoraFile lora = read_lora(changed([](HostArrays& arrays) {
                                    arrays.erase("lora_unet_conv_in.lora_down.weight");
                                    arrays.erase("lora_unet_conv_in.lora_up.weight");
                                  }),
                                  targets);
  const std::string log = testing::internal::GetCapturedStderr();
  EXPECT_TRUE(contains(log, "are left out: alphas without matrices: lora_unet_conv_in.alpha")) << log;
  EXPECT_FALSE(lora.pairs.at("unet").contains("conv_in.weight"));
  EXPECT_EQ(lora.pairs.at("unet").at("mid_block.resnets.1.conv2.weight").alpha, 3);
}

TEST_F(LoraFiles, WithNumbersThatAreNotFiniteAreRefusedByName) {
  for (const float number : {NAN, INFINITY}) {
    const std::string message = refusal([&](HostArrays& arrays) {
      HostArray& a = arrays.at("lora_unet_conv_in.lora_up.weight");
      HostArray bad(a.shape());
      std::ranges::copy(a.view<float>(), bad.mutable_view<float>().begin());
      bad.mutable_view<float>()[5] = number;
      a = bad;
    });
    EXPECT_TRUE(
        contains(message, "'lora_unet_conv_in.lora_up.weight' holds a number that is not finite, the first at index 5"))
        << message;
  }
}

TEST_F(LoraFiles, OfAnotherShapeAreLeftOutIfAsked) {
  const std::vector<float> wide(9, 1.0F);
  const std::string path = changed([&](HostArrays& arrays) {
    arrays["lora_unet_conv_in.lora_up.weight"] = arrays.at("lora_unet_conv_out.lora_up.weight");
    arrays["lora_unet_conv_norm_out.diff_b"] = HostArray::of<float>({DType::f32, {9}}, wide);
  });
  const std::string refused = message_of([&] { read_lora(path, targets); });
  EXPECT_TRUE(contains(refused, "try: lora_missing_keys=warn")) << refused;
  testing::internal::CaptureStderr();
  const LoraFile lora = read_lora(path, targets, "", MissingKeys::left_out);
  const std::string log = testing::internal::GetCapturedStderr();
  EXPECT_TRUE(contains(log, "3 of ") && contains(log, "keys are of another shape than this model's weights") &&
              contains(log,
                       "lora_unet_conv_in.lora_down.weight, lora_unet_conv_in.lora_up.weight, "
                       "lora_unet_conv_norm_out.diff_b"))
      << log;
  EXPECT_TRUE(lora.differences.empty());
  EXPECT_FALSE(lora.pairs.at("unet").contains("conv_in.weight"));
  EXPECT_TRUE(lora.pairs.at("unet").contains("conv_out.weight"));
}

TEST_F(LoraFiles, WithUnreadKeysAreRefusedByList) {
  const std::string message = refusal([](HostArrays& arrays) {
    arrays["lora_unet_down_blocks_9_attentions_0_proj_in.lora_down.weight"] = arrays.begin()->second;
    arrays["lora_te3_something.alpha"] = arrays.begin()->second;
    arrays["lora_unet_conv_in.difference"] = arrays.begin()->second;
  });
  EXPECT_TRUE(contains(message, "3 of ")) << message;
  for (const char* key : {"lora_unet_down_blocks_9_attentions_0_proj_in.lora_down.weight", "lora_te3_something.alpha",
                          "lora_unet_conv_in.difference"})
    EXPECT_TRUE(contains(message, key)) << message;
}

TEST_F(LoraFiles, OfAnotherModelAreRefused) {
  const std::string path = write_layout(layout, folder.path());
  const TracedModels other = traced_models("sd15");
  const std::string message = message_of([&] { read_lora(path, LoraTargets(other.params, lora_names_of("sd15"))); });
  EXPECT_TRUE(contains(message, "lora_te2_")) << message;
  EXPECT_TRUE(contains(message, "the model has: text_encoder, unet")) << message;
}

TEST_F(LoraFiles, OfOtherMethodsAreRefusedByName) {
  // Methods that are not read, and parts of those that are next to a pair of matrices, or of no size.
  const std::vector<std::pair<const char*, const char*>> cases = {
      {"lora_unet_conv_in.oft_blocks", "key 'lora_unet_conv_in.oft_blocks' is of OFT"},
      {"lora_unet_conv_in.a1.weight", "is of GLoRA"},
      {"lora_unet_conv_in.boft_R", "is of BOFT"},
      {"lora_controlnet", "is of Control-LoRA"},
      {"lora_unet_conv_in.hada_t1", "key 'lora_unet_conv_in.hada_t1' is of LoHa with a core tensor"},
      {"lora_unet_conv_in.dora_scale", "DoRA for conv_in.weight of unet"},
      {"unet.conv_in.lora_magnitude_vector", "DoRA for conv_in.weight of unet"},
      {"lora_unet_conv_in.hada_w1_a", "there is 'lora_unet_conv_in.hada_w1_a' next to matrices of LoRA"},
      {"lora_unet_conv_in.lokr_w1", "there is 'lora_unet_conv_in.lokr_w1' next to matrices of LoRA"},
      {"lora_unet_conv_in.lora_mid.weight", "conv_in.weight of unet"}};
  for (const auto& [key, text] : cases) {
    const std::string message = refusal([&key = key](HostArrays& arrays) { arrays[key] = arrays.begin()->second; });
    EXPECT_TRUE(contains(message, text)) << message;
  }
  const auto refused = [&](const char* json) { return refusal([](HostArrays&) {}, {{"lora_adapter_metadata", json}}); };
  EXPECT_TRUE(contains(refused(R"({"unet.use_qalora": true})"), "use_qalora"));
  EXPECT_TRUE(contains(refused(R"({"unet.bias": "all"})"), "'bias' is \"all\""));
  EXPECT_TRUE(contains(refused(R"({"unet.peft_type": "OFT"})"), "'peft_type' is \"OFT\""));
  EXPECT_TRUE(contains(refused(R"({"unet.init_lora_weights": "pissa_niter_4"})"), "pissa"));
  EXPECT_TRUE(contains(refused(R"({"unet.lora_alpha": "much"})"), "lora_adapter_metadata of unet"));
  EXPECT_TRUE(contains(refused("nonsense"), "expected a JSON object"));
}

TEST_F(LoraFiles, OfQuantizedMatricesAreRefusedByNameWhateverTheKeysSay) {
  const std::string module = "lora_unet_conv_in.lora_down", weight = module + ".weight";
  const std::string rotated = R"({"format": "int8_tensorwise", "convrot": true})";
  const auto bytes = [](const std::string& text) { return HostArray::of<char>({DType::u8, {std::ssize(text)}}, text); };
  const HostArray one = HostArray::of<float>({DType::f32, {}}, {{1.0F}});
  const auto int8 = [&](HostArrays& a) { a[weight] = HostArray(Shape{DType::s8, a.at(weight).dims()}); };
  const auto float8 = [&](HostArrays& a) { a[weight] = a.at(weight).cast(DType::f8e4m3fn); };
  const std::vector<std::tuple<Change, std::map<std::string, std::string>, const char*>> cases = {
      {[&](HostArrays& a) { int8(a), a[module + ".weight_scale"] = one, a[module + ".comfy_quant"] = bytes(rotated); },
       {},
       "rotated weights (convrot)"},
      {[&](HostArrays& a) { int8(a), a[module + ".weight_scale"] = one; },
       {{"_quantization_metadata", "{\"layers\": {\"" + module + "\": " + rotated + "}}"}},
       "rotated weights (convrot)"},
      {[&](HostArrays& a) { a["lora_unet_conv_in.comfy_quant"] = bytes(rotated); },
       {},
       "'lora_unet_conv_in.comfy_quant' marks quantized weights, but the file holds no 'lora_unet_conv_in.weight'"},
      {[&](HostArrays& a) { float8(a), a[module + ".scale_weight"] = one; }, {}, "scaled float8"},
      {[&](HostArrays& a) { float8(a), a[module + ".weight_scale_inv"] = one; }, {}, "weight_scale_inv"},
      {int8, {}, "'lora_unet_conv_in.lora_down.weight' is s8; expected float32"},
  };
  for (const auto& [change, metadata, text] : cases) {
    const std::string path = changed(change, metadata);
    for (const MissingKeys missing : {MissingKeys::refused, MissingKeys::left_out}) {
      const std::string message = message_of([&] { read_lora(path, targets, "", missing); });
      EXPECT_TRUE(contains(message, text)) << message;
    }
    const std::string resized = message_of([&] { read_lora_contents(path); });
    EXPECT_TRUE(contains(resized, text)) << resized;
  }
  // float8 without a scale is what it says.
  const LoraFile plain = read_lora(changed(float8), targets);
  EXPECT_EQ(plain.pairs.at("unet").at("conv_in.weight").down.dtype(), DType::f8e4m3fn);
}

TEST_F(LoraFiles, OfOtherShapesAreRefusedWithBoth) {
  std::string message = refusal([](HostArrays& arrays) {
    HostArray& a = arrays.at("lora_unet_conv_in.lora_down.weight");
    a = a.reshaped({2, 4, 9});
  });
  EXPECT_TRUE(contains(message, "[2,4,9,1]") && contains(message, "[2,4,3,3]")) << message;
  message = refusal([](HostArrays& arrays) {
    arrays["lora_unet_conv_in.lora_up.weight"] = arrays.at("lora_unet_conv_out.lora_up.weight");
  });
  EXPECT_TRUE(contains(message, "[4,2,1,1]") && contains(message, "[8,2,1,1]")) << message;
}

TEST_F(LoraFiles, WithHalfAPairOrTwoNamesForOneAreRefused) {
  EXPECT_TRUE(contains(refusal([](HostArrays& a) { a.erase("lora_unet_conv_in.lora_up.weight"); }),
                       "'lora_unet_conv_in.lora_down.weight' without its up matrix"));
  EXPECT_TRUE(contains(
      refusal([](HostArrays& a) { a["unet.conv_in.lora_A.weight"] = a.at("lora_unet_conv_in.lora_down.weight"); }),
      "'lora_unet_conv_in.lora_down.weight' and 'unet.conv_in.lora_A.weight' are both for"));
  EXPECT_TRUE(contains(refusal([](HostArrays& a) { a.clear(); }), "holds no matrices"));
}

// read_lora refuses what the model does not have; a program may lack weights that it does not read.
TEST_F(LoraFiles, ForWeightsThatAProgramDoesNotReadAreSkipped) {
  LoraFile lora = read_lora(write_layout(layout, folder.path()), targets);
  HostArrays merged = models.values, values = models.values;
  merge_loras({{lora, 1}}, models.params, merged);
  EXPECT_GT(distance(merged, models.values).value, 0);
  lora.pairs["unet"]["nowhere.weight"] = lora.pairs.at("unet").at("conv_in.weight");
  merge_loras({{lora, 1}}, models.params, values);
  EXPECT_EQ(distance(values, merged).value, 0);
}

TEST_F(LoraFiles, WrittenHaveTheKeysOfDiffusersAndReadBack) {
  const LoraFile lora = read_lora(write_layout(layout, folder.path()), targets);
  // A folder to keep for tools/check_lora.py.
  const char* out_folder = std::getenv("MD_LORA_OUT");
  const std::string out = out_folder ? out_folder : folder / "out";
  const std::string peft = write_peft_lora(out, lora, kUnet), kohya = out + "/kohya.safetensors";
  write_kohya_lora(kohya, lora, kUnet, true);
  for (const auto& [component, name] : components_of("sdxl")) {
    std::filesystem::create_directories(out + "/" + component);
    write_file_atomic(out + "/" + component + "/config.json", read_file(golden_path(name + "/config.json")));
  }
  const auto check = [&](const std::string& path, const Layout& golden) {
    const SafetensorsReader file = SafetensorsReader::open(path);
    EXPECT_EQ(file.tensors().size(), golden.keys.size());
    for (const auto& [key, value] : golden.keys.items()) EXPECT_TRUE(file.tensors().contains(key)) << key;
    const LoraFile back = read_lora(path, targets);
    for (const auto& [component, pairs] : lora.pairs)
      for (const auto& [weight, pair] : pairs) {
        const LoraPair& b = back.pairs.at(component).at(weight);
        EXPECT_EQ(b.alpha, pair.alpha) << weight;
        EXPECT_EQ(distance(HostArrays{{"down", b.down}, {"up", b.up}}, {{"down", pair.down}, {"up", pair.up}}).value,
                  0);
      }
  };
  check(kohya, layout);
  const Layout golden = recorded_layout("sdxl", "peft");
  check(peft, golden);
  const json ours = parse_json(SafetensorsReader::open(peft).metadata().at("lora_adapter_metadata")),
             theirs = parse_json(golden.metadata.at("lora_adapter_metadata").get<std::string>());
  for (const auto& [key, value] : ours.items()) EXPECT_EQ(value, theirs.at(key)) << key;
  for (const char* key : {"unet.r", "unet.lora_alpha", "unet.rank_pattern", "text_encoder_2.target_modules"})
    EXPECT_TRUE(ours.contains(key)) << key;
}

TEST(LoraNames, CountTheBlocksOfTheOriginalModels) {
  const auto path_of = [](const char* config, const char* name) {
    const json c = parse_json(read_file(golden_path(std::string("full/") + config + ".json")));
    Graph g;
    ParamTable params;
    const int64_t text = c.at("cross_attention_dim");
    UNetInputs in{.sample = g.input("x", {DType::f32, {1, 64, 64, 4}}),
                  .timestep = g.input("t", {DType::f32, {1}}),
                  .encoder_hidden_states = g.input("c", {DType::f32, {1, 77, text}})};
    if (text == 2048) {
      in.text_embeds = g.input("e", {DType::f32, {1, 1280}});
      in.time_ids = g.input("s", {DType::f32, {1, 6}});
    }
    unet2d(Scope(g, params, "unet"), UNetConfig::from_json(c), in);
    const LoraTargets targets(
        params, {.denoisers = {"unet"}, .others = {{"unet", original_unet_names(UNetConfig::from_json(c))}}});
    const std::vector<LoraPlace> found = targets.find("unet", std::string(name) + "_weight", "unet");
    return found.size() == 1 ? found[0].target->path : "nothing";
  };
  EXPECT_EQ(path_of("unet_sdxl", "input_blocks_4_1_transformer_blocks_1_attn1_to_q"),
            "down_blocks.1.attentions.0.transformer_blocks.1.attn1.to_q.weight");
  EXPECT_EQ(path_of("unet_sdxl", "output_blocks_2_2_conv"), "up_blocks.0.upsamplers.0.conv.weight");
  EXPECT_EQ(path_of("unet_sdxl", "output_blocks_8_0_skip_connection"), "up_blocks.2.resnets.2.conv_shortcut.weight");
  EXPECT_EQ(path_of("unet_sdxl", "label_emb_0_2"), "add_embedding.linear_2.weight");
  // In SD 1.x the first upsampler shares its block with a resnet only.
  EXPECT_EQ(path_of("unet_sd15", "output_blocks_2_1_conv"), "up_blocks.0.upsamplers.0.conv.weight");
  EXPECT_EQ(path_of("unet_sd15", "output_blocks_5_2_conv"), "up_blocks.1.upsamplers.0.conv.weight");
  EXPECT_EQ(path_of("unet_sd15", "output_blocks_11_1_proj_in"), "up_blocks.3.attentions.2.proj_in.weight");
  EXPECT_EQ(path_of("unet_sd15", "input_blocks_9_0_op"), "down_blocks.2.downsamplers.0.conv.weight");
  EXPECT_EQ(path_of("unet_sd15", "input_blocks_11_0_out_layers_3"), "down_blocks.3.resnets.1.conv2.weight");
}

}  // namespace
}  // namespace md
