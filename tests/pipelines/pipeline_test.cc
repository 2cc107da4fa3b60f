// One loaded pipeline for many requests: what it compiles and reads again, the state after a cancelled request, and
// that its media equal the command's.
#include "maxdiffusion/pipelines/pipeline.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <thread>

#include "maxdiffusion/base/host_array_rows.h"
#include "maxdiffusion/commands/generate.h"
#include "maxdiffusion/commands/plan_generate.h"
#include "maxdiffusion/media/image.h"
#include "tests/cli/command.h"

namespace md {
namespace {

const std::string kGoldens = MD_SOURCE_DIR "/tests/golden/", kSd = kGoldens + "pipelines/sd",
                  kSdxl = kGoldens + "pipelines/sdxl", kWan = kGoldens + "wan/t2v", kWan2 = kGoldens + "wan/a14b",
                  kFlux = kGoldens + "flux/dev";

class LoadedPipeline : public testing::Test {
 protected:
  LoadedPipeline() {
    options.layers.activations_dtype = "float32";
    options.layers.precision = "HIGHEST";
    options.compile.xla_flags = "--xla_backend_optimization_level=0";
    options.compile.uses = [this](const std::string&) { ++compiled; };
    options.model.max_sequence_length = 12;
    request.prompt = {"a red heart"};
    request.num_inference_steps = 4;
    request.height = request.width = 16;
    request.sample_seed = 5;
  }
  /// Sets up a request for a video.
  void ask_for_video() {
    request.height = request.width = 32;
    request.num_frames = 5;
    request.scheduler.flow_shift = 3;
  }
  /// The image that the command generates with the same words.
  std::string image_of_command(const std::string& model, std::vector<std::string> words,
                               const std::string& command = "generate") {
    std::filesystem::remove_all(t / "out");
    const std::vector<std::string> all = {command,
                                          MD_SOURCE_DIR "/tests/pipelines/generate.yml",
                                          "pretrained_model_name_or_path=" + model,
                                          "output_dir=" + (t / "out"),
                                          "prompt=a red heart",
                                          "num_inference_steps=4",
                                          "seed=5"};
    words.insert(words.begin(), all.begin(), all.end());
    const Outcome o = maxdiffusion(words);
    EXPECT_EQ(o.status, 0) << o.err;
    return from_parameters(all_files(t / "out"));  // only one file
  }
  static std::string png(const SampleResult& r) {
    return from_parameters(encode_png(image_of_batch(r.media, 0), {{"parameters", r.parameters.at(0)}}));
  }
  /// Without the command's keys, which come first.
  static std::string from_parameters(const std::string& bytes) { return bytes.substr(bytes.find("iTXtparameters")); }
  static bool same(const HostArray& a, const HostArray& b) {
    return a.shape() == b.shape() && std::memcmp(a.data(), b.data(), a.bytes()) == 0;
  }
  /// The error message of `f`.
  static std::string refusal(const std::function<void()>& f) {
    try {
      f();
    } catch (const Error& e) {
      EXPECT_EQ(e.code(), Code::invalid_config) << e.what();
      return e.what();
    }
    return "";
  }

  TemporaryFolder t;
  int compiled = 0;
  PipelineOptions options;
  SampleRequest request;
};

TEST_F(LoadedPipeline, CompilesNothingForAnotherGuidanceScale) {
  for (const std::string& folder : {kSd, kFlux}) {  // of classifier-free guidance; of the denoiser's input
    auto at = [&](double scale) {
      request.guidance_scale = scale;
      return request;
    };
    DiffusionPipeline pipeline = DiffusionPipeline::load(folder, options);
    const SampleResult weak = pipeline.generate(at(2));
    const int before = compiled;
    const SampleResult strong = pipeline.generate(at(9));
    EXPECT_EQ(compiled, before) << folder;
    EXPECT_FALSE(same(weak.latents, strong.latents)) << folder;
    EXPECT_TRUE(same(DiffusionPipeline::load(folder, options).generate(at(9)).latents, strong.latents)) << folder;
  }
}

TEST_F(LoadedPipeline, CompilesAndReadsNothingForASecondRequestOfTheSameSizes) {
  std::filesystem::copy(kSd, t / "model", std::filesystem::copy_options::recursive);
  DiffusionPipeline pipeline = DiffusionPipeline::load(t / "model", options);
  EXPECT_EQ(compiled, 0);
  const SampleResult first = pipeline.generate(request);
  EXPECT_EQ(compiled, 3);  // text encoder, denoiser, decoder
  for (const char* part : {"unet", "vae", "text_encoder"}) std::filesystem::remove_all((t / "model/") + part);
  SampleRequest other = request;
  other.prompt = {"blue"}, other.negative_prompt = {"purple"}, other.sample_seed = 6;
  const SampleResult second = pipeline.generate(other);
  EXPECT_EQ(compiled, 3);
  EXPECT_FALSE(same(first.media, second.media));
  // Another size needs another denoiser and decoder; the text encoder does not depend on it.
  other.width = 24;
  EXPECT_EQ(to_string(pipeline.generate(other).media.shape()), "f32[1,16,24,3]");
  EXPECT_EQ(compiled, 5);
  // Requests in between do not change a bit.
  const SampleResult again = pipeline.generate(request);
  EXPECT_EQ(compiled, 5);
  EXPECT_TRUE(same(again.media, first.media));
  EXPECT_TRUE(same(again.latents, first.latents));
  EXPECT_EQ(again.parameters, first.parameters);
  // The program of one step does not depend on their number; that of all steps does, and computes the same.
  request.num_inference_steps = 7;
  const SampleResult seven = pipeline.generate(request);
  EXPECT_EQ(compiled, 5);
  request.scan_diffusion_loop = true;
  const SampleResult at_once = pipeline.generate(request);
  EXPECT_EQ(compiled, 6);
  const std::vector<double> all = at_once.latents.to_doubles(), each = seven.latents.to_doubles();
  for (size_t i = 0; i < each.size(); ++i) EXPECT_NEAR(all[i], each[i], 1e-4) << i;  // of up to 24
  request.num_inference_steps = 6;
  pipeline.generate(request);
  EXPECT_EQ(compiled, 7);
}

TEST_F(LoadedPipeline, GivesTheCommandsImagesWhetherItStaysOrNot) {
  struct Model {
    std::string folder;
    std::vector<std::string> words;
    int64_t side;
  };
  for (const auto& [folder, words, side] :
       {Model{kSd, {"height=16", "width=16"}, 16}, Model{kSdxl, {"height=16", "width=16"}, 16},
        Model{kFlux, {"height=32", "width=32", "max_sequence_length=12"}, 32}}) {
    const std::string expected = image_of_command(folder, words);
    request.height = request.width = side;
    for (const bool keep : {true, false}) {
      options.keep_loaded = keep;
      DiffusionPipeline pipeline = DiffusionPipeline::load(folder, options);
      for (int i = 0; i < 2; ++i) EXPECT_TRUE(png(pipeline.generate(request)) == expected) << folder << keep << i;
    }
  }
}

TEST_F(LoadedPipeline, ACancelledRequestEndsBetweenStepsAndLeavesNoTrace) {
  DiffusionPipeline pipeline = DiffusionPipeline::load(kSd, options);
  const SampleResult expected = DiffusionPipeline::load(kSd, options).generate(request);
  std::stop_source before;
  before.request_stop();
  request.stop = before.get_token();
  compiled = 0;
  EXPECT_THROW(pipeline.generate(request), Cancelled);
  EXPECT_EQ(compiled, 0);

  std::stop_source source;
  request.stop = source.get_token();
  int64_t last = 0;
  request.progress = [&](SampleStage stage, int64_t done, int64_t total) {
    if (stage != SampleStage::step) return;
    last = done;
    if (done == 2) std::thread([&] { source.request_stop(); }).join();
    EXPECT_GT(total, 3);
  };
  EXPECT_THROW(pipeline.generate(request), Cancelled);
  EXPECT_EQ(last, 2);
  // An exception from a callback also ends the request.
  request.stop = {};
  request.progress = [](SampleStage, int64_t done, int64_t) {
    if (done == 3) throw std::runtime_error("enough");
  };
  EXPECT_THROW(pipeline.generate(request), std::runtime_error);

  request.progress = {};
  const SampleResult next = pipeline.generate(request);
  EXPECT_TRUE(same(next.media, expected.media));
  EXPECT_TRUE(same(next.latents, expected.latents));
}

TEST_F(LoadedPipeline, ChangesItsLorasWithoutCompiling) {
  const auto with = [](const std::vector<std::string>& files) {
    LoraKeys keys;
    keys.lora_files = files;
    return keys;
  };
  const std::string lora = kGoldens + "pipelines/lora_kohya.safetensors";
  DiffusionPipeline pipeline = DiffusionPipeline::load(kSdxl, options);
  const SampleResult plain = pipeline.generate(request);
  options.lora = with({lora});
  const SampleResult expected = DiffusionPipeline::load(kSdxl, options).generate(request);
  EXPECT_FALSE(same(plain.media, expected.media));
  compiled = 0;
  pipeline.set_loras(with({lora}));
  EXPECT_TRUE(same(pipeline.generate(request).media, expected.media));
  EXPECT_THROW(pipeline.set_loras(with({kGoldens + "pipelines/none.safetensors"})), Error);
  EXPECT_TRUE(same(pipeline.generate(request).media, expected.media)) << "those before";
  pipeline.set_loras({});
  EXPECT_TRUE(same(pipeline.generate(request).media, plain.media));
  EXPECT_EQ(compiled, 0);
}

/// Samples part by part: what of `request` runs up to a part of the way from noise to data, changed by `change`.
struct Part {
  double end;
  std::function<void(SampleRequest&)> change;
};
HostArray in_parts(DiffusionPipeline& pipeline, SampleRequest request, const std::vector<Part>& parts) {
  double start = 0;
  for (const Part& part : parts) {
    SampleRequest r = request;
    part.change(r);
    r.decode = false;
    if (part.end < 1) r.denoising_end = part.end;
    if (start > 0) r.denoising_start = start;
    request.image_latents = pipeline.generate(r).latents;
    start = part.end;
  }
  return request.image_latents;
}

double difference(const HostArray& a, const HostArray& b) {
  const std::vector<double> x = a.to_doubles(), y = b.to_doubles();
  double worst = 0, most = 1;
  for (size_t i = 0; i < x.size(); ++i)
    worst = std::max(worst, std::abs(x[i] - y.at(i))), most = std::max(most, std::abs(x[i]));
  fmt::print("  difference {:.2g}\n", worst / most);
  return worst / most;
}

TEST_F(LoadedPipeline, LorasOfSomeStepsAreThoseOfPartsByHand) {
  const std::string file = kGoldens + "pipelines/lora_kohya.safetensors";
  const LoraKeys all{.lora_files = {file}, .lora_text_scales = {0}};
  LoraKeys some = all, first = all;
  some.lora_steps = {"1-0.75"}, first.lora_steps = {"-2"};
  request.scheduler.scheduler = "euler";
  request.num_images_per_prompt = 2;  // one after the other
  for (const bool stacked : {false, true}) {
    options.layers.scan_layers = stacked;
    DiffusionPipeline pipeline = DiffusionPipeline::load(kSdxl, options);
    const SampleResult plain = pipeline.generate(request);
    const auto with = [&](const LoraKeys& keys) { return [&, keys](SampleRequest&) { pipeline.set_loras(keys); }; };
    const HostArray by_hand = in_parts(pipeline, request, {{0.25, with({})}, {0.75, with(all)}, {1, with({})}}),
                    by_hand_first = in_parts(pipeline, request, {{0.5, with(all)}, {1, with({})}});
    pipeline.set_loras(all);
    const SampleResult whole = pipeline.generate(request);
    compiled = 0;
    pipeline.set_loras(some);
    const SampleResult steps = pipeline.generate(request);
    EXPECT_LT(difference(steps.latents, by_hand), 1e-6);
    EXPECT_GT(difference(steps.latents, plain.latents), 1e-3);
    EXPECT_GT(difference(steps.latents, whole.latents), 1e-3);
    EXPECT_TRUE(same(pipeline.generate(request).latents, steps.latents)) << "weights after an image are those before";
    pipeline.set_loras(first);
    EXPECT_LT(difference(pipeline.generate(request).latents, by_hand_first), 1e-6);
    pipeline.set_loras({});
    EXPECT_TRUE(same(pipeline.generate(request).latents, plain.latents));
    EXPECT_EQ(compiled, 0);
    // An image that ends early leaves no trace.
    pipeline.set_loras(some);
    request.progress = [](SampleStage, int64_t done, int64_t) {
      if (done == 2) throw std::runtime_error("enough");
    };
    EXPECT_THROW(pipeline.generate(request), std::runtime_error);
    request.progress = {};
    EXPECT_TRUE(same(pipeline.generate(request).latents, steps.latents));
  }
}

TEST_F(LoadedPipeline, LorasOfSomeStepsChangeQuantizedWeights) {
  options.layers.base_weights_dtype = "int8";
  request.scheduler.scheduler = "euler";
  const LoraKeys all{.lora_files = {kGoldens + "pipelines/lora_kohya.safetensors"}, .lora_text_scales = {0}};
  LoraKeys some = all;
  some.lora_steps = {"2-"};
  DiffusionPipeline pipeline = DiffusionPipeline::load(kSdxl, options);
  const auto with = [&](const LoraKeys& keys) { return [&, keys](SampleRequest&) { pipeline.set_loras(keys); }; };
  const HostArray by_hand = in_parts(pipeline, request, {{0.5, with({})}, {1, with(all)}});
  pipeline.set_loras(some);
  EXPECT_LT(difference(pipeline.generate(request).latents, by_hand), 1e-6);
}

TEST_F(LoadedPipeline, LorasOfSomeStepsAreRefusedWhereWeightsCannotChange) {
  options.lora = {.lora_files = {kGoldens + "pipelines/lora_kohya.safetensors"}, .lora_steps = {"1-2"}};
  DiffusionPipeline pipeline = DiffusionPipeline::load(kSdxl, options);
  request.scan_diffusion_loop = true;
  EXPECT_TRUE(contains(refusal([&] { pipeline.generate(request); }),
                       "with scan_diffusion_loop=true; expected false: weights change between steps"));
  request.scan_diffusion_loop = false, request.cache.use_deepcache = true;
  EXPECT_TRUE(contains(refusal([&] { pipeline.generate(request); }),
                       "with use_deepcache=true; expected false: it reuses what other weights gave"));
}

TEST_F(LoadedPipeline, PromptsThatChangeBetweenStepsGiveWhatPartsByHandGive) {
  request.scheduler.scheduler = "euler";
  request.prompt_syntax = "a1111";
  request.num_images_per_prompt = 2;
  const auto of = [](const std::string& prompt, const std::string& negative) {
    return [=](SampleRequest& r) { r.prompt = {prompt}, r.negative_prompt = {negative}; };
  };
  for (const std::string& folder : {kSd, kSdxl}) {
    DiffusionPipeline pipeline = DiffusionPipeline::load(folder, options);
    of("a red heart", "purple")(request);
    const SampleResult plain = pipeline.generate(request);
    compiled = 0;
    const auto sampled = [&](const std::string& prompt, const std::string& negative) {
      SampleRequest r = request;
      of(prompt, negative)(r);
      return pipeline.generate(r).latents;
    };
    EXPECT_LT(difference(
                  sampled("a [red:blue:0.5] heart", "purple"),
                  in_parts(pipeline, request, {{0.5, of("a red heart", "purple")}, {1, of("a blue heart", "purple")}})),
              1e-6);
    EXPECT_GT(difference(sampled("a [red:blue:0.5] heart", "purple"), plain.latents), 1e-3);
    EXPECT_LT(difference(sampled("a [red|blue] heart", "[(purple:1.2)::3]"),
                         in_parts(pipeline, request,
                                  {{0.25, of("a red heart", "(purple:1.2)")},
                                   {0.5, of("a blue heart", "(purple:1.2)")},
                                   {0.75, of("a red heart", "(purple:1.2)")},
                                   {1, of("a blue heart", "")}})),
              1e-6);
    EXPECT_EQ(compiled, 0);
    // Longer prompts in some steps.
    EXPECT_LT(difference(sampled("a [red:blue BREAK sky:1] heart", "purple"),
                         in_parts(pipeline, request,
                                  {{0.25, of("a red heart", "purple")}, {1, of("a blue BREAK sky heart", "purple")}})),
              2e-5);
    // Of several prompts each has its own texts; equal texts are encoded once.
    SampleRequest both = request;
    both.prompt = {"a [red:blue:2] heart", "a [blue:red:1] heart"};
    both.seeds = {5, 5};
    const HostArray two = pipeline.generate(both).latents;
    EXPECT_LT(difference(rows(two, 0, 2), sampled("a [red:blue:2] heart", "purple")), 5e-6);
    EXPECT_LT(difference(rows(two, 2, 2), sampled("a [blue:red:1] heart", "purple")), 5e-6);
  }
}

TEST_F(LoadedPipeline, PromptsWithAndAddTheirPartsToThePredictionWithoutThem) {
  request.scheduler.scheduler = "euler";
  request.prompt_syntax = "a1111";
  request.num_inference_steps = 1;  // the sample is linear in the prediction
  request.num_images_per_prompt = 2;
  request.decode = false;
  request.negative_prompt = {"purple"};
  for (const std::string& folder : {kSd, kSdxl}) {
    DiffusionPipeline pipeline = DiffusionPipeline::load(folder, options);
    const auto sampled = [&](const std::string& prompt, double scale = 3) {
      SampleRequest r = request;
      r.prompt = {prompt}, r.guidance_scale = scale;
      return pipeline.generate(r).latents.to_doubles();
    };
    // With scale 1, of the prompt alone: x(c). Without guidance the negative prompt alone is a prompt.
    const std::vector<double> none = sampled("purple", 1), cat = sampled("a (red:1.2) cat", 1),
                              dog = sampled("blue BREAK dog", 1), sky = sampled("sky", 1);
    const auto expect = [&](const std::string& prompt, double c, double d, double s, double tolerance) {
      const std::vector<double> got = sampled(prompt);
      double worst = 0, most = 1;
      for (size_t i = 0; i < got.size(); ++i) {
        const double want = none[i] + 3 * (c * (cat[i] - none[i]) + d * (dog[i] - none[i]) + s * (sky[i] - none[i]));
        worst = std::max(worst, std::abs(got[i] - want)), most = std::max(most, std::abs(want));
      }
      EXPECT_LT(worst, tolerance * most) << folder << ": " << prompt;
    };
    expect("a (red:1.2) cat", 1, 0, 0, 2e-6);
    expect("a (red:1.2) cat :0.5 AND sky :1.5", 0.5, 0, 1.5, 2e-6);
    expect("a (red:1.2) cat :-0.5 AND sky AND a (red:1.2) cat :0.25", -0.25, 0, 1, 2e-6);
    expect("a (red:1.2) cat:1.2 AND blue BREAK dog :0.8 AND sky:0.1", 1.2, 0.8, 0.1, 2e-5);  // of unequal chunks
    // Prompts with fewer parts in one batch.
    SampleRequest both = request;
    both.prompt = {"a (red:1.2) cat :0.5 AND sky :1.5", "sky"}, both.seeds = {5, 5}, both.guidance_scale = 3;
    both.negative_prompt = {"purple"};
    const std::vector<double> two = pipeline.generate(both).latents.to_doubles();
    const std::vector<double> first = sampled(both.prompt[0]), second = sampled("sky");
    for (size_t i = 0; i < first.size(); ++i) {
      EXPECT_NEAR(two[i], first[i], 1e-5);
      EXPECT_NEAR(two[first.size() + i], second[i], 1e-5);
    }
  }
}

TEST_F(LoadedPipeline, PromptsWithAndMayChangeBetweenSteps) {
  request.scheduler.scheduler = "euler";
  request.prompt_syntax = "a1111";
  const auto of = [](const std::string& prompt) { return [=](SampleRequest& r) { r.prompt = {prompt}; }; };
  DiffusionPipeline pipeline = DiffusionPipeline::load(kSdxl, options);
  of("a [red:blue:0.5] heart :0.7 AND [sky|sea]")(request);
  EXPECT_LT(difference(pipeline.generate(request).latents, in_parts(pipeline, request,
                                                                    {{0.25, of("a red heart :0.7 AND sky")},
                                                                     {0.5, of("a red heart :0.7 AND sea")},
                                                                     {0.75, of("a blue heart :0.7 AND sky")},
                                                                     {1, of("a blue heart :0.7 AND sea")}})),
            1e-6);
}

TEST_F(LoadedPipeline, PromptsWithAndAreRefusedWithoutGuidanceOfTwoPredictions) {
  DiffusionPipeline pipeline = DiffusionPipeline::load(kSdxl, options);
  request.prompt = {"a cat AND a dog"}, request.prompt_syntax = "a1111";
  const auto refused = [&](const std::string& text, const std::function<void(SampleRequest&)>& change) {
    SampleRequest r = request;
    change(r);
    const std::string message = refusal([&] { pipeline.generate(r); });
    EXPECT_TRUE(contains(message, "prompt has AND with " + text)) << message;
  };
  refused("guidance_scale too low to guide", [](SampleRequest& r) { r.guidance_scale = 1; });
  refused("guidance_method=apg", [](SampleRequest& r) { r.guidance_method = "apg"; });
  refused("guidance_interval", [](SampleRequest& r) { r.guidance_interval = {0.2, 1}; });
  refused("pag_scale", [](SampleRequest& r) { r.pag_scale = 3; });
  refused("use_deepcache=true", [](SampleRequest& r) { r.cache.use_deepcache = true; });
  refused("prompt_2", [](SampleRequest& r) { r.prompt_2 = {"a bird"}; });
}

TEST_F(LoadedPipeline, StepsOfPromptsAreThoseOfSamplersThatCallTheModelTwice) {
  // Heun's second call of a step has the text of the first, and PNDM's 5 calls are 4 steps.
  for (const char* scheduler : {"heun", "pndm"}) {
    request.prompt_syntax = "a1111", request.scheduler.scheduler = scheduler;
    DiffusionPipeline pipeline = DiffusionPipeline::load(kSd, options);
    const auto sampled = [&](const std::string& prompt) {
      request.prompt = {prompt};
      return pipeline.generate(request).latents;
    };
    const HostArray first = sampled("red"), by_part = sampled("[red:blue:0.5]");
    EXPECT_TRUE(same(by_part, sampled("[red:blue:2]"))) << scheduler;
    EXPECT_FALSE(same(by_part, sampled("[red:blue:3]"))) << scheduler;
    EXPECT_FALSE(same(first, sampled("[red:blue:3]"))) << scheduler;
    EXPECT_TRUE(same(first, sampled("[red:blue:4]"))) << scheduler;
  }
}

TEST_F(LoadedPipeline, StepsOfPromptsGoOnInTheSecondPassOfHires) {
  request.prompt_syntax = "a1111", request.scheduler.scheduler = "euler";
  request.hires_scale = 2, request.hires_strength = 0.5, request.hires_upscaler = "latent";
  DiffusionPipeline pipeline = DiffusionPipeline::load(kSd, options);
  const auto sampled = [&](const std::string& prompt) {
    request.prompt = {prompt};
    return pipeline.generate(request).latents;
  };
  const HostArray red = sampled("red"), then_blue = sampled("[red:blue:4]");
  EXPECT_FALSE(same(red, then_blue));
  EXPECT_FALSE(same(sampled("blue"), then_blue));
  EXPECT_TRUE(same(then_blue, sampled("[red:blue:1.0]")));
  EXPECT_TRUE(same(red, sampled("[red:blue:99]")));
  EXPECT_FALSE(same(then_blue, sampled("[red:blue:1.25]")));  // after the first of two steps
  EXPECT_FALSE(same(red, sampled("[red:blue:1.25]")));
}

TEST_F(LoadedPipeline, PromptsThatChangeAreRefusedWhereTextsCannot) {
  DiffusionPipeline pipeline = DiffusionPipeline::load(kSd, options);
  request.prompt = {"[red:blue:0.5]"}, request.prompt_syntax = "a1111";
  request.scan_diffusion_loop = true;
  EXPECT_TRUE(contains(refusal([&] { pipeline.generate(request); }),
                       "prompt has [from:to:when] or [a|b] with scan_diffusion_loop=true; expected false"));
  request.scan_diffusion_loop = false, request.cache.use_deepcache = true;
  EXPECT_TRUE(contains(refusal([&] { pipeline.generate(request); }),
                       "prompt has [from:to:when] or [a|b] with use_deepcache=true; expected false"));
}

TEST_F(LoadedPipeline, SeedsOfEachPromptGiveWhatRequestsOfTheirOwnGive) {
  DiffusionPipeline pipeline = DiffusionPipeline::load(kSd, options);
  request.scheduler.scheduler = "euler";
  request.num_images_per_prompt = 2;
  std::vector<std::string> expected;
  for (const auto& [prompt, seed] : {std::pair{"red", 5}, {"blue", 9}}) {
    request.prompt = {prompt}, request.sample_seed = seed;
    const SampleResult r = pipeline.generate(request);
    for (int64_t i = 0; i < 2; ++i)
      expected.push_back(encode_png(image_of_batch(r.media, i)) + r.parameters[static_cast<size_t>(i)]);
  }
  request.prompt = {"red", "blue"}, request.seeds = {5, 9};
  const SampleResult r = pipeline.generate(request);
  for (int64_t i = 0; i < 4; ++i)
    EXPECT_TRUE(encode_png(image_of_batch(r.media, i)) + r.parameters[static_cast<size_t>(i)] ==
                expected[static_cast<size_t>(i)])
        << i << r.parameters[static_cast<size_t>(i)];
  request.seeds = {5};
  EXPECT_TRUE(
      contains(refusal([&] { pipeline.generate(request); }), "seeds: 1 are given for 2 prompts; expected one each"));
  request.seeds = {5, 9};
  request.scheduler.scheduler = "euler_ancestral";
  EXPECT_TRUE(contains(refusal([&] { pipeline.generate(request); }), "and a sampler that adds noise"));
  request.scheduler.scheduler = "euler", request.hires_scale = 2;
  EXPECT_TRUE(contains(refusal([&] { pipeline.generate(request); }), "hires_scale is 2 with seeds; expected 1"));
}

TEST_F(LoadedPipeline, AnotherOnItsDevicesGivesTheSame) {
  DiffusionPipeline first = DiffusionPipeline::load(kSd, options);
  DiffusionPipeline second = DiffusionPipeline::load_on_same_devices(first, kSdxl, options);
  EXPECT_EQ(&first.devices().client(), &second.devices().client());
  const SampleResult expected = DiffusionPipeline::load(kSdxl, options).generate(request);
  EXPECT_TRUE(same(second.generate(request).media, expected.media));
}

TEST_F(LoadedPipeline, SaysHowFarItIsAndGivesLatentsAlone) {
  DiffusionPipeline pipeline = DiffusionPipeline::load(kSdxl, options);
  request.prompt = {"red", "blue"};
  request.num_images_per_prompt = 2;
  request.scheduler.scheduler = "euler";
  std::vector<std::string> stages;
  request.progress = [&](SampleStage stage, int64_t done, int64_t total) {
    stages.push_back(fmt::format("{} {}/{}", static_cast<int>(stage), done, total));
  };
  const SampleResult whole = pipeline.generate(request);
  std::vector<std::string> expected = {"0 2/2", "1 0/16"};  // before and, as follows, after the program is compiled
  for (int done = 0; done <= 16; ++done) expected.push_back(fmt::format("1 {}/16", done));
  expected.insert(expected.end(), {"2 4/4", "3 4/4"});
  EXPECT_EQ(stages, expected);
  EXPECT_EQ(to_string(whole.media.shape()), "f32[4,16,16,3]");
  EXPECT_EQ(whole.parameters.size(), 4U);
  EXPECT_TRUE(contains(whole.parameters[2],
                       "blue\nSteps: 4, Sampler: Euler, CFG scale: 7.5, Seed: 5, "
                       "Size: 16x16, Model: sdxl, Image: 2"))
      << whole.parameters[2];
  request.decode = false;
  const SampleResult latents = pipeline.generate(request);
  EXPECT_FALSE(latents.media);
  EXPECT_TRUE(same(latents.latents, whole.latents));
  // The second sample of each prompt, generated alone, is the same image.
  request.num_images_per_prompt = 1, request.prompt = {"red"}, request.first_sample = 1;
  EXPECT_TRUE(contains(pipeline.generate(request).parameters.at(0), "Image: 1"));
}

TEST_F(LoadedPipeline, TakesLoraFilesAndAControlNet) {
  const std::string lora = kGoldens + "pipelines/lora_peft.safetensors";
  const std::string plain = png(DiffusionPipeline::load(kSdxl, options).generate(request));
  PipelineOptions tuned = options;
  tuned.lora = {.lora_files = {lora}, .lora_scales = {0.8}};
  const std::string with_lora = png(DiffusionPipeline::load(kSdxl, tuned).generate(request));
  EXPECT_TRUE(with_lora != plain);
  EXPECT_TRUE(with_lora ==
              image_of_command(kSdxl, {"height=16", "width=16", "lora_files=" + lora, "lora_scales=[0.8]"}));

  HostArray image(Shape{DType::u8, {70, 140, 3}});
  for (size_t i = 0; i < image.bytes(); ++i) image.mutable_view<uint8_t>()[i] = static_cast<uint8_t>(i * 7 % 251);
  write_png(t / "control.png", image);
  options.controlnets = {kGoldens + "pipelines/controlnet"};
  DiffusionPipeline pipeline = DiffusionPipeline::load(kSd, options);
  EXPECT_TRUE(contains(refusal([&] { pipeline.generate(request); }), "controlnet_image is empty"));
  request.controls = {{.image = image, .scale = 0.7}};
  request.height.reset(), request.width.reset();  // default: the image's size, in multiples of 64
  const SampleResult controlled = pipeline.generate(request);
  EXPECT_EQ(to_string(controlled.media.shape()), "f32[1,64,128,3]");
  EXPECT_TRUE(png(controlled) ==
              image_of_command(kSd,
                               {"controlnet_model_name_or_path=" + options.controlnets[0],
                                "controlnet_image=" + (t / "control.png"), "controlnet_conditioning_scale=0.7"},
                               "generate_controlnet"));
  const int before = compiled;
  request.controls[0].image = HostArray(image.shape());
  EXPECT_FALSE(same(pipeline.generate(request).media, controlled.media));
  EXPECT_EQ(compiled, before);
}

TEST_F(LoadedPipeline, AdaptersOfImagesAreCompiledAndReadOnce) {
  HostArray image(Shape{DType::u8, {40, 60, 3}});
  for (size_t i = 0; i < image.bytes(); ++i) image.mutable_view<uint8_t>()[i] = static_cast<uint8_t>(i * 7 % 251);
  for (const char* adapter : {"sd_ip", "sd_ip_plus"}) {
    std::filesystem::remove_all(t / "adapter");
    std::filesystem::copy(kGoldens + "adapters/" + adapter, t / "adapter", std::filesystem::copy_options::recursive);
    std::filesystem::remove_all(t / "t2i");
    std::filesystem::copy(kGoldens + "adapters/sd_t2i", t / "t2i", std::filesystem::copy_options::recursive);
    options.adapters = {.ip_adapter = t / "adapter", .t2i_adapter = t / "t2i"};
    DiffusionPipeline pipeline = DiffusionPipeline::load(kSd, options);
    request.adapters = {{"ip_adapter", {image, 0.7}}, {"t2i_adapter", {image, 0.7}}};
    compiled = 0;
    const SampleResult first = pipeline.generate(request);
    EXPECT_EQ(compiled, 5);  // text encoder, each adapter, denoiser, decoder
    for (const char* folder : {"adapter", "t2i"}) std::filesystem::remove_all(t / folder);
    EXPECT_TRUE(same(pipeline.generate(request).media, first.media));
    for (auto& a : request.adapters) a.second.image = HostArray(image.shape());
    EXPECT_FALSE(same(pipeline.generate(request).media, first.media));
    EXPECT_EQ(compiled, 5);
  }
}

TEST_F(LoadedPipeline, LoadsModelsOneAtATimeWhereMemoryIsUsedUp) {
  DiffusionPipeline pipeline = DiffusionPipeline::load(kSd, options);
  const SampleResult expected = pipeline.generate(request);
  int full = 0, most = 2;
  request.progress = [&](SampleStage stage, int64_t, int64_t) {
    if (stage == SampleStage::denoised && full++ < most) throw Error(Code::out_of_memory, "memory is used up");
  };
  EXPECT_THROW(pipeline.generate(request), Error);  // the request is too large in any case
  EXPECT_EQ(full, 2);
  EXPECT_TRUE(same(pipeline.generate(request).media, expected.media));
  compiled = 0;
  EXPECT_TRUE(same(pipeline.generate(request).media, expected.media));
  EXPECT_EQ(compiled, 0);

  full = 0, most = 1;
  EXPECT_TRUE(same(pipeline.generate(request).media, expected.media));
  EXPECT_EQ(full, 2);
  EXPECT_EQ(compiled, 3);  // nothing was kept
  EXPECT_TRUE(same(pipeline.generate(request).media, expected.media));
  EXPECT_EQ(compiled, 6);
  full = 0;  // now it is an error
  EXPECT_THROW(pipeline.generate(request), Error);
  EXPECT_EQ(full, 1);
}

TEST_F(LoadedPipeline, VideosOfBothExpertsStayOnTheDevices) {
  ask_for_video();
  for (const auto& [folder, most] : {std::pair{kWan, 4}, {kWan2, 5}}) {
    options.keep_loaded = false;
    const SampleResult expected = DiffusionPipeline::load(folder, options).generate(request);
    EXPECT_EQ(to_string(expected.media.shape()), "f32[1,5,32,32,3]");
    options.keep_loaded = true;
    std::filesystem::remove_all(t / "model");
    std::filesystem::copy(folder, t / "model", std::filesystem::copy_options::recursive);
    DiffusionPipeline pipeline = DiffusionPipeline::load(t / "model", options);
    compiled = 0;
    EXPECT_TRUE(same(pipeline.generate(request).media, expected.media)) << folder;
    EXPECT_EQ(compiled, most)
        << folder;  // text encoder, one or two denoisers, the decoders of the first and later chunks
    for (const char* part : {"transformer", "transformer_2", "vae", "text_encoder"})
      std::filesystem::remove_all((t / "model/") + part);
    EXPECT_TRUE(same(pipeline.generate(request).media, expected.media)) << folder;
    EXPECT_EQ(compiled, most) << folder;
  }
}

TEST_F(LoadedPipeline, CachesOfStepsAndPromptsFindTheirWeights) {
  ask_for_video();
  DiffusionPipeline pipeline = DiffusionPipeline::load(kWan, options);
  const SampleResult plain = pipeline.generate(request);
  request.cache.use_kv_cache = true;
  options.keep_loaded = false;
  const SampleResult expected = DiffusionPipeline::load(kWan, options).generate(request);
  for (int i = 0; i < 2; ++i) EXPECT_TRUE(same(pipeline.generate(request).media, expected.media)) << i;
  const int before = compiled;
  request.cache.use_kv_cache = false;
  EXPECT_TRUE(same(pipeline.generate(request).media, plain.media));
  EXPECT_EQ(compiled, before);
}

TEST_F(LoadedPipeline, CachesOfBlocksAndLevelsStay) {
  for (const std::string& folder : {kSd, kFlux}) {
    DiffusionPipeline pipeline = DiffusionPipeline::load(folder, options);
    const SampleResult plain = pipeline.generate(request);
    SampleRequest cached = request;
    cached.cache.use_deepcache = folder == kSd, cached.cache.use_first_block_cache = folder == kFlux;
    cached.cache.first_block_cache_threshold = 1e9;
    compiled = 0;
    const SampleResult reused = pipeline.generate(cached);
    EXPECT_FALSE(same(reused.latents, plain.latents)) << folder;
    EXPECT_EQ(compiled, folder == kSd ? 2 : 1) << folder;  // two graphs of steps; one that decides
    EXPECT_TRUE(same(pipeline.generate(cached).latents, reused.latents)) << folder;
    EXPECT_TRUE(same(pipeline.generate(request).latents, plain.latents)) << folder;
    EXPECT_EQ(compiled, folder == kSd ? 2 : 1) << folder;
  }
}

TEST_F(LoadedPipeline, WorksOnSeveralDevices) {
  options.hardware.cpu_device_count = 2;
  request.prompt = {"red", "blue", "heart"};
  DiffusionPipeline pipeline = DiffusionPipeline::load(kSd, options);
  const SampleResult first = pipeline.generate(request);
  EXPECT_EQ(to_string(first.media.shape()), "f32[3,16,16,3]");
  const int before = compiled;
  EXPECT_TRUE(same(pipeline.generate(request).media, first.media));
  EXPECT_EQ(compiled, before);
  request.prompt = {"red"};
  pipeline.generate(request);
}

TEST_F(LoadedPipeline, RefusesWhatTheModelCannotDoAndTakesTheNextRequest) {
  DiffusionPipeline pipeline = DiffusionPipeline::load(kSd, options);
  const auto refused = [&](auto&& change) {
    SampleRequest r = request;
    change(r);
    return refusal([&] { pipeline.generate(r); });
  };
  EXPECT_TRUE(contains(refused([](auto& r) { r.prompt = {}; }), "prompt is empty"));
  EXPECT_TRUE(contains(refused([](auto& r) { r.height = 17; }), "height=17"));
  EXPECT_TRUE(contains(refused([](auto& r) { r.sample_seed = -1; }), "sample_seed is -1; expected 0 or more"));
  EXPECT_TRUE(contains(refused([](auto& r) {
                         r.images.resize(2, HostArray(Shape{DType::u8, {8, 8, 3}}));
                       }),
                       "image: 2 images are given for 1 prompt"));
  EXPECT_TRUE(contains(refused([](auto& r) {
                         r.controls = {{.image = HostArray(Shape{DType::u8, {8, 8, 3}})}};
                       }),
                       "controlnet_image is given; expected none"));
  EXPECT_TRUE(contains(refused([](auto& r) {
                         r.latents = HostArray(Shape{DType::f32, {3, 2, 2, 4}}), r.prompt = {"a", "b"};
                       }),
                       "latents are of 3 images; 2 prompts need 2"));
  EXPECT_TRUE(contains(refused([](auto& r) { r.scheduler.scheduler = "flow_euler"; }), "this one predicts epsilon"));
  EXPECT_EQ(compiled, 0);
  EXPECT_EQ(to_string(pipeline.generate(request).media.shape()), "f32[1,16,16,3]");
}

TEST(PlanGenerate, IsMadeOfTheKeysAlone) {
  const RunConfig c = RunConfig::from_source(ConfigSource::from_text(
      "prompt: red\nprompt_2: blue\nresolution: 64\nseed: 3\noutput_dir: images\nper_device_batch_size: 2\n"
      "controlnet_conditioning_scale: 0.5\ncontrolnet_image: [c.png, d.png]\nimage: a.png\noutput_type: "
      "latent\nlora_files: [b.safetensors]\n",
      {"pretrained_model_name_or_path=nowhere", "prompt=green", "cpu_device_count=2", "width=32"}));
  const GenerateRequest request = generate_request(c);
  const GeneratePlan plan = plan_generate(request);
  EXPECT_EQ(plan.model, "nowhere");
  EXPECT_EQ(plan.folder, "images");
  EXPECT_EQ(plan.items.at(0).sampling.request.prompt, Texts{"green"});
  EXPECT_TRUE(plan.items.at(0).sampling.request.prompt_2.empty());  // it belongs to another prompt
  EXPECT_EQ(plan.items.at(0).sampling.request.sample_seed, 3);
  EXPECT_EQ(plan.items.at(0).sampling.request.resolution, 64);
  EXPECT_EQ(plan.items.at(0).sampling.request.width, 32);
  EXPECT_FALSE(plan.items.at(0).sampling.request.height);
  EXPECT_FALSE(plan.items.at(0).sampling.request.decode);
  ASSERT_EQ(plan.items.at(0).sampling.request.controls.size(), 2u);
  EXPECT_EQ(plan.items.at(0).sampling.request.controls[1].scale, 0.5);
  EXPECT_EQ(plan.items.at(0).sampling.files.control_images, (std::vector<std::string>{"c.png", "d.png"}));
  EXPECT_EQ(plan.items.at(0).sampling.files.images, (std::vector<std::string>{"a.png"}));
  EXPECT_EQ(plan.pipeline.lora.lora_files, std::vector<std::string>{"b.safetensors"});
  EXPECT_EQ(plan.pipeline.hardware.cpu_device_count, 2);
  EXPECT_EQ(plan.pipeline.batch.per_device, 2);
  EXPECT_FALSE(plan.pipeline.keep_loaded);
  EXPECT_TRUE(plan.pipeline.controlnets.empty());
  EXPECT_THROW(plan_generate(request, {.with_control = true}), Error);
}

TEST(PlanGenerate, LinesOfOneSizeAreCompiledOnce) {
  const TemporaryFolder t;
  write_file_atomic(t / "lines.txt", "one\n--prompt two --width 24\nthree\n--prompt four --width 24 --seed 9\none\n");
  RunConfig c = RunConfig::load(MD_SOURCE_DIR "/tests/pipelines/generate.yml",
                                {"pretrained_model_name_or_path=" + kSd, "output_dir=" + (t / "out"), "height=16",
                                 "width=16", "num_inference_steps=2", "prompt_file=" + (t / "lines.txt")});
  std::map<std::string, int> compiled;
  c.compile.uses = [&](const std::string& program) { ++compiled[program]; };
  generate(generate_request(c));
  EXPECT_EQ(compiled.size(), 5u);  // text encoder; denoiser and decoder of two sizes
  for (const auto& [program, times] : compiled) EXPECT_EQ(times, 1) << program;
  const auto pixels = [&](int i) { return pixels_of(t / fmt::format("out/image_{}.png", i)); };
  EXPECT_EQ(pixels(4), pixels(0));
  EXPECT_NE(pixels(2), pixels(0));
}

TEST(PlanGenerate, LinesWithOtherLoraFilesAreCompiledOnceAndCheckedFirst) {
  const TemporaryFolder t;
  make_folders(t / "loras");
  const std::string golden = kGoldens + "pipelines/lora_kohya.safetensors";
  std::filesystem::copy(golden, t / "loras/style.safetensors");
  write_file_atomic(t / "loras/damaged.safetensors", "none");
  write_file_atomic(t / "lines.txt", "one\none<lora:style:0.7>\none\none<lora:style:0.7>\n");
  const auto config = [&](std::vector<std::string> words) {
    words.insert(words.begin(), {"pretrained_model_name_or_path=" + kSdxl, "output_dir=" + (t / "out"), "height=16",
                                 "width=16", "num_inference_steps=2"});
    return RunConfig::load(MD_SOURCE_DIR "/tests/pipelines/generate.yml", words);
  };
  RunConfig c = config({"lora_dir=" + (t / "loras"), "prompt_file=" + (t / "lines.txt")});
  std::map<std::string, int> compiled;
  c.compile.uses = [&](const std::string& program) { ++compiled[program]; };
  generate(generate_request(c));
  EXPECT_EQ(compiled.size(), 3u);
  for (const auto& [program, times] : compiled) EXPECT_EQ(times, 1) << program;
  generate(generate_request(config({"prompt=one"})));
  generate(generate_request(config({"prompt=one", "lora_files=" + golden, "lora_scales=0.7"})));
  const auto pixels = [&](int i) { return pixels_of(t / fmt::format("out/image_sdxl_{}.png", i)); };
  EXPECT_NE(pixels(4), pixels(5));
  for (int i = 0; i < 4; ++i) EXPECT_EQ(pixels(i), pixels(4 + i % 2)) << i;

  write_file_atomic(t / "lines.txt", "one\none<lora:damaged:1>\n");
  std::string error;
  try {
    generate(generate_request(config({"lora_dir=" + (t / "loras"), "prompt_file=" + (t / "lines.txt")})));
  } catch (const Error& e) {
    error = e.what();
  }
  EXPECT_TRUE(error.find("damaged.safetensors") != error.npos && error.find("lines.txt:2") != error.npos) << error;
  EXPECT_FALSE(exists(t / "out/image_sdxl_6.png"));
}

TEST(PlanGenerate, LinesReplaceTheirKeys) {
  const TemporaryFolder t;
  write_file_atomic(t / "lines.txt", "one\n--prompt two --prompt_2 second\n--steps 3\n");
  const RunConfig c = RunConfig::from_source(ConfigSource::from_text(
      "prompt: red\nprompt_2: blue\nseed: 3\noutput_dir: images\n", {"prompt_file=" + (t / "lines.txt")}));
  const std::vector<GenerateItem> items = generate_request(c).items;
  ASSERT_EQ(items.size(), 3u);
  const auto texts = [&](size_t i) {
    const SampleRequest& r = items[i].sampling.request;
    return r.prompt.at(0) + (r.prompt_2.empty() ? "" : "|" + r.prompt_2[0]);
  };
  EXPECT_EQ(texts(0), "one");  // the second prompt belongs to another prompt
  EXPECT_EQ(texts(1), "two|second");
  EXPECT_EQ(texts(2), "red|blue");
  EXPECT_EQ(items[2].sampling.request.num_inference_steps, 3);
  EXPECT_EQ(items[2].sampling.request.sample_seed, 3);
  EXPECT_EQ(items[2].where, t / "lines.txt:3");
}

}  // namespace
}  // namespace md
