// Quantized models, written by convert and read by all code that reads weights.
#include <gtest/gtest.h>

#include <cmath>
#include <filesystem>

#include "maxdiffusion/checkpoint/quantized_writers.h"
#include "maxdiffusion/checkpoint/safetensors.h"
#include "tests/cli/command.h"
#include "tests/single_file/wide_folder.h"

namespace md {
namespace {

namespace fs = std::filesystem;
const std::string kGolden = MD_SOURCE_DIR "/tests/golden/";

double relative_distance(const HostArray& got, const HostArray& want) {
  const std::vector<double> g = got.to_doubles(), w = want.to_doubles();
  double apart = 0, size = 0;
  for (size_t i = 0; i < w.size(); ++i) apart += (g.at(i) - w[i]) * (g[i] - w[i]), size += w[i] * w[i];
  return std::sqrt(apart / size);
}

/// FLUX.1 with layers that are two blocks of 32 wide, or an unchanged family folder.
class FewBits : public testing::Test {
 protected:
  void copy(const std::string& golden) { fs::copy(kGolden + golden, folder, fs::copy_options::recursive); }
  Outcome convert(const std::string& from, const std::string& to, std::vector<std::string> words) const {
    words.insert(words.begin(), {"convert", from, to});
    return maxdiffusion(words);
  }
  HostArray sample(std::vector<std::string> words) const {
    words.insert(words.begin(),
                 {"generate", MD_SOURCE_DIR "/tests/pipelines/generate.yml", "output_dir=" + (t / "images"),
                  "pretrained_model_name_or_path=" + folder, "prompt=red heart", "resolution=16",
                  "num_inference_steps=2", "output_type=np", "seed=3", "max_sequence_length=12"});
    const Outcome o = maxdiffusion(words);
    EXPECT_EQ(o.status, 0) << o.err;
    if (o.status != 0) return {};
    HostArray images = SafetensorsReader::open(t / "images/images.safetensors").tensors().at("images");
    fs::remove_all(t / "images");
    return images;
  }
  TemporaryFolder t;
  const std::string folder = t / "folder";
};

struct Written {
  const char *file, *dtype;
  double least, most;  // distance of a matrix
};

TEST_F(FewBits, AConvertedDenoiserIsReadBackAsCloseAsItsTypeSaysAndSamples) {
  write_wide_folder("flux/dev", folder, kWideFlux);
  const HostArrays before = SafetensorsReader::open(folder + "/transformer").tensors();
  const HostArray images = sample({});
  for (const Written& w :
       {Written{"a.gguf", "float32", 0, 0}, Written{"b.gguf", "", 0, 0}, Written{"c.gguf", "q8_0", 1e-3, 6e-3},
        Written{"d.gguf", "q4_0", 0.05, 0.12}, Written{"e.safetensors", "float8_e4m3fn", 0.01, 0.04}}) {
    SCOPED_TRACE(w.file);
    const std::string file = t / w.file;
    Outcome o = convert(folder, file, {"component=transformer", std::string("dtype=") + w.dtype});
    ASSERT_EQ(o.status, 0) << o.err;
    o = convert(file, t / "back", {"component=transformer", "single_file_config=" + folder});
    ASSERT_EQ(o.status, 0) << o.err;
    const HostArrays after = SafetensorsReader::open(t / "back").tensors();
    fs::remove_all(t / "back");
    ASSERT_EQ(after.size(), before.size());
    const std::string matrix = "transformer_blocks.0.ff.net.0.proj.weight";
    const double apart = relative_distance(after.at(matrix), before.at(matrix));
    EXPECT_GE(apart, w.least);
    EXPECT_LE(apart, w.most);
    const std::string norm = "transformer_blocks.0.attn.norm_q.weight";
    EXPECT_EQ(after.at(norm).to_doubles(), before.at(norm).to_doubles());
    const HostArray with = sample({"wan_transformer_pretrained_model_name_or_path=" + file});
    ASSERT_TRUE(with && images);
    const double images_apart = relative_distance(with, images);
    EXPECT_LE(images_apart, w.most);
    EXPECT_EQ(images_apart > 0, w.most > 0);
  }
  EXPECT_LT(fs::file_size(t / "c.gguf"), fs::file_size(t / "a.gguf") / 2);
  EXPECT_LT(fs::file_size(t / "d.gguf"), fs::file_size(t / "c.gguf"));
}

// As those that stable-diffusion.cpp reads and writes.
TEST_F(FewBits, AWholePipelineIsOneGgufFileWithItsOriginalNames) {
  copy("pipelines/sd");
  const HostArray images = sample({});
  for (const auto& [dtype, most] : {std::pair{"float32", 0.0}, {"q8_0", 0.01}}) {
    const std::string file = t / (std::string(dtype) + ".gguf");
    const Outcome o = convert(folder, file, {std::string("dtype=") + dtype});
    ASSERT_EQ(o.status, 0) << o.err;
    const SafetensorsReader written = SafetensorsReader::open(file);
    for (const char* name :
         {"model.diffusion_model.input_blocks.0.0.weight", "first_stage_model.decoder.conv_in.weight",
          "cond_stage_model.transformer.text_model.embeddings.token_embedding.weight"})
      EXPECT_EQ(written.tensors().count(name), 1U) << name;
    const HostArray with = sample({"pretrained_model_name_or_path=" + file, "single_file_config=" + folder});
    ASSERT_TRUE(with && images);
    const double apart = relative_distance(with, images);
    EXPECT_LE(apart, most);
    EXPECT_EQ(apart > 0, most > 0);
  }
}

TEST_F(FewBits, AConvertedQwenEncoderHasLlamasNamesAndIsReadBack) {
  write_wide_folder("zimage/base", folder, kWideQwen3, "text_encoder");
  const HostArrays before = SafetensorsReader::open(folder + "/text_encoder").tensors();
  for (const auto& [dtype, least, most] : {std::tuple{"float32", 0.0, 0.0}, {"q8_0", 1e-3, 6e-3}}) {
    const std::string file = t / (std::string(dtype) + ".gguf");
    Outcome o = convert(folder, file, {"component=text_encoder", std::string("dtype=") + dtype});
    ASSERT_EQ(o.status, 0) << o.err;
    const SafetensorsReader written = SafetensorsReader::open(file);
    EXPECT_EQ(written.metadata().at("general.architecture"), "qwen3");
    EXPECT_EQ(written.tensors().count("blk.2.attn_output.weight"), 1U);
    o = convert(file, t / "back", {"component=text_encoder", "single_file_config=" + folder});
    ASSERT_EQ(o.status, 0) << o.err;
    const HostArrays after = SafetensorsReader::open(t / "back").tensors();
    fs::remove_all(t / "back");
    ASSERT_EQ(after.size(), before.size());
    const double apart =
        relative_distance(after.at("layers.1.mlp.down_proj.weight"), before.at("layers.1.mlp.down_proj.weight"));
    EXPECT_GE(apart, least);
    EXPECT_LE(apart, most);
  }
}

TEST_F(FewBits, WeightsOfMoreThanFourAxesKeepTheirSizesInGguf) {
  copy("wan/t2v");
  const Outcome o = convert(folder, t / "a.gguf", {"component=transformer", "dtype=float32"});
  ASSERT_EQ(o.status, 0) << o.err;
  const SafetensorsReader file = SafetensorsReader::open(t / "a.gguf");
  EXPECT_EQ(file.metadata().at("general.architecture"), "wan");
  const HostArray& patches = file.tensors().at("patch_embedding.weight");
  EXPECT_EQ(patches.dims().size(), 5u);
}

TEST_F(FewBits, AT5EncoderGoesToGgufUnderLlamasNamesAndBack) {
  copy("flux/dev");
  const HostArray images = sample({});
  const Outcome o = convert(folder, t / "t5.gguf", {"component=text_encoder_2"});
  ASSERT_EQ(o.status, 0) << o.err;
  const SafetensorsReader file = SafetensorsReader::open(t / "t5.gguf");
  for (const char* name : {"token_embd.weight", "enc.blk.0.attn_rel_b.weight", "enc.blk.1.attn_o.weight",
                           "enc.blk.1.ffn_gate.weight", "enc.blk.1.ffn_norm.weight", "enc.output_norm.weight"})
    EXPECT_TRUE(file.tensors().contains(name)) << name;
  fs::remove_all(folder + "/text_encoder_2/model.safetensors");
  const HostArray with = sample({"t5xxl_model_name_or_path=" + (t / "t5.gguf")});
  ASSERT_TRUE(with && images);
  EXPECT_EQ(relative_distance(with, images), 0);
}

TEST_F(FewBits, ALanguageModelIsReadFromTheGgufFileOfItsFolder) {
  copy("zimage/base");
  const HostArray images = sample({});
  const std::string part = folder + "/text_encoder/", model = part + "model.safetensors";
  HostArrays renamed;
  for (const auto& [name, array] : SafetensorsReader::open(model).tensors()) {
    std::string llama = name.starts_with("model.") ? name.substr(6) : name;
    for (const auto& [published, theirs] :
         std::vector<std::pair<std::string, std::string>>{{"layers.", "blk."},
                                                          {"self_attn.q_norm", "attn_q_norm"},
                                                          {"self_attn.k_norm", "attn_k_norm"},
                                                          {"self_attn.q_proj", "attn_q"},
                                                          {"self_attn.k_proj", "attn_k"},
                                                          {"self_attn.v_proj", "attn_v"},
                                                          {"self_attn.o_proj", "attn_output"},
                                                          {"mlp.gate_proj", "ffn_gate"},
                                                          {"mlp.up_proj", "ffn_up"},
                                                          {"mlp.down_proj", "ffn_down"},
                                                          {"post_attention_layernorm", "ffn_norm"},
                                                          {"input_layernorm", "attn_norm"},
                                                          {"embed_tokens", "token_embd"}})
      if (const size_t at = llama.find(published); at != std::string::npos) llama.replace(at, published.size(), theirs);
    renamed[llama == "norm.weight" ? "output_norm.weight" : llama] = array;
  }
  write_gguf(part + "qwen.gguf", to_write(renamed), nullptr, "qwen3");
  fs::remove(model);
  const HostArray with = sample({});
  ASSERT_TRUE(with && images);
  EXPECT_EQ(relative_distance(with, images), 0);
}

TEST_F(FewBits, ALoraIsTrainedBesideABaseInFewBitsResumedToTheBitAndTheSameOnEightDevices) {
  write_wide_folder("flux/dev", folder, kWideFlux);
  const auto train = [&](const std::string& run, int steps, std::vector<std::string> words) {
    words.insert(words.begin(),
                 {"train", MD_SOURCE_DIR "/tests/pipelines/generate.yml", "pretrained_model_name_or_path=" + folder,
                  "output_dir=" + t.path(), "run_name=" + run, "dataset_type=synthetic", "synthetic_num_samples=8",
                  "resolution=16", "max_sequence_length=12", "train_lora=true", "lora_rank=2", "lr_scheduler=constant",
                  "warmup_steps_fraction=0", "learning_rate=1e-2", "checkpoint_every=2",
                  fmt::format("max_train_steps={}", steps)});
    const Outcome o = maxdiffusion(words);
    EXPECT_EQ(o.status, 0) << o.err;
    return fmt::format("{}/{}/checkpoints/{}/pytorch_lora_weights.safetensors", t.path(), run, steps);
  };
  const HostArrays plain = SafetensorsReader::open(train("plain", 4, {"per_device_batch_size=8"})).tensors();
  const auto distance = [](const HostArrays& a, const HostArrays& b) {
    double most = 0;
    for (const auto& [name, array] : b)
      if (name.find("lora_B") != name.npos) most = std::max(most, relative_distance(a.at(name), array));
    return most;
  };
  for (const std::string type : {"nf4", "int8", "float8_e4m3fn"}) {
    SCOPED_TRACE(type);
    for (const std::string scan : {"false", "true"}) {
      if (scan == "false" && type != "nf4") continue;
      const std::vector<std::string> words = {"base_weights_dtype=" + type, "scan_layers=" + scan};
      auto with = [&](std::vector<std::string> extra) {
        extra.insert(extra.end(), words.begin(), words.end());
        return extra;
      };
      const std::string name = type + scan;
      const std::string whole = train(name, 4, with({"per_device_batch_size=8"}));
      train(name + "_again", 2, with({"per_device_batch_size=8"}));
      const std::string resumed = train(name + "_again", 4, with({"per_device_batch_size=8"}));
      EXPECT_EQ(read_file(resumed), read_file(whole));
      const HostArrays one = SafetensorsReader::open(whole).tensors();
      EXPECT_GT(distance(one, plain), 0);
      if (scan == "false") continue;
      const HostArrays eight =
          SafetensorsReader::open(train(name + "_mesh", 4,
                                        with({"per_device_batch_size=1", "cpu_device_count=8", "ici_data_parallelism=2",
                                              "ici_fsdp_parallelism=4"})))
              .tensors();
      EXPECT_LT(distance(eight, one), 1e-2);
    }
  }
}

TEST_F(FewBits, SamplesFromABaseInFewBitsAreNearAndDifferAndKeepWhatIsSkipped) {
  write_wide_folder("flux/dev", folder, kWideFlux);
  const HostArray plain = sample({});
  double before = 0;
  for (const std::string type : {"int8", "float8_e4m3fn", "nf4"}) {
    SCOPED_TRACE(type);
    const double apart = relative_distance(sample({"base_weights_dtype=" + type}), plain);
    EXPECT_GT(apart, before);  // fewer bits, larger distance
    EXPECT_LT(apart, 0.2);
    before = apart;
    const double skipped =
        relative_distance(sample({"base_weights_dtype=" + type,
                                  "base_quantization_skip=[transformer_blocks, single_transformer_blocks, "
                                  "outside_blocks]"}),
                          plain);
    EXPECT_EQ(skipped, 0);
    const double texts = relative_distance(sample({"text_encoder_base_weights_dtype=int8"}), plain);
    EXPECT_GT(texts, 0);
    EXPECT_LT(texts, 0.05);
  }
}

TEST_F(FewBits, ABaseInFewBitsIsNotTrained) {
  copy("flux/dev");
  const Outcome o =
      maxdiffusion({"train", MD_SOURCE_DIR "/tests/pipelines/generate.yml", "pretrained_model_name_or_path=" + folder,
                    "output_dir=" + t.path(), "run_name=a", "dataset_type=synthetic", "base_weights_dtype=int8"});
  EXPECT_EQ(o.status, 2);
  EXPECT_TRUE(contains(o.err, "base_weights_dtype needs train_lora: weights in few bits are not trained")) << o.err;
}

TEST_F(FewBits, AFileInFewBitsIsNotTrainedButALoraBesideItIs) {
  write_wide_folder("flux/dev", folder, kWideFlux);
  const auto train = [&](const std::string& file, std::vector<std::string> words) {
    words.insert(words.begin(),
                 {"train", MD_SOURCE_DIR "/tests/pipelines/generate.yml", "pretrained_model_name_or_path=" + folder,
                  "unet_checkpoint=" + file, "output_dir=" + t.path(), "run_name=a", "dataset_type=synthetic",
                  "resolution=16", "max_sequence_length=12", "max_train_steps=1", "learning_rate=1e-3"});
    return maxdiffusion(words);
  };
  for (const auto& [name, dtype] : {std::pair{"a.gguf", "q8_0"}, {"a.safetensors", "float8_e4m3fn"}}) {
    const std::string file = t / name;
    ASSERT_EQ(convert(folder, file, {"component=transformer", std::string("dtype=") + dtype}).status, 0);
    Outcome o = train(file, {});
    EXPECT_EQ(o.status, 2);
    EXPECT_TRUE(contains(o.err, "transformer: weights in few bits are not trained, and '")) << o.err;
    EXPECT_TRUE(contains(o.err, "' in '" + file + "' is ")) << o.err;
    EXPECT_TRUE(contains(o.err, "try: train_lora=true, or convert " + file +
                                    " OUT.safetensors component=transformer single_file_config=FOLDER dtype=bfloat16"))
        << o.err;
    EXPECT_FALSE(exists(t / "a/config.yml"));
    o = train(file, {"train_lora=true"});
    EXPECT_EQ(o.status, 0) << o.err;
    fs::remove_all(t / "a");
  }
  const std::string plain = t / "plain.safetensors";
  ASSERT_EQ(
      convert(t / "a.gguf", plain, {"component=transformer", "dtype=bfloat16", "single_file_config=" + folder}).status,
      0);
  const Outcome o = train(plain, {});
  EXPECT_EQ(o.status, 0) << o.err;
}

TEST_F(FewBits, AFileWhoseTextEncoderAloneIsInFewBitsIsTrained) {
  write_wide_folder("flux/dev", folder, kWideFlux);
  ASSERT_EQ(convert(folder, t / "plain.safetensors", {"component=transformer"}).status, 0);
  HostArrays all;
  for (const auto& [name, array] : SafetensorsReader::open(t / "plain.safetensors").tensors())
    all["model.diffusion_model." + name] = array;
  const auto train = [&] {
    write_safetensors(t / "whole.safetensors", all);
    return maxdiffusion({"train", MD_SOURCE_DIR "/tests/pipelines/generate.yml",
                         "pretrained_model_name_or_path=" + folder, "unet_checkpoint=" + (t / "whole.safetensors"),
                         "output_dir=" + t.path(), "run_name=a", "dataset_type=synthetic", "resolution=16",
                         "max_sequence_length=12", "max_train_steps=1", "learning_rate=1e-3"});
  };
  all["text_encoders.t5xxl.transformer.shared.weight"] = HostArray(Shape{DType::f32, {32, 32}}).cast(DType::f8e4m3fn);
  Outcome o = train();
  EXPECT_EQ(o.status, 0) << o.err;
  HostArray& taken = all.at("model.diffusion_model.double_blocks.0.img_attn.proj.weight");
  taken = taken.cast(DType::f8e4m3fn);
  fs::remove_all(t / "a");
  o = train();
  EXPECT_EQ(o.status, 2);
  EXPECT_TRUE(contains(o.err, "'model.diffusion_model.double_blocks.0.img_attn.proj.weight' in '")) << o.err;
}

TEST_F(FewBits, BlocksAreSwappedOnlyWhereTheyCanBe) {
  write_wide_folder("flux/dev", folder, kWideFlux);
  // A CPU's memory is the host's.
  EXPECT_EQ(relative_distance(sample({"scan_layers=true", "blocks_to_swap=2"}), sample({"scan_layers=true"})), 0);
  const auto run = [&](const char* command, std::vector<std::string> words) {
    words.insert(words.begin(), {command, MD_SOURCE_DIR "/tests/pipelines/generate.yml", "output_dir=" + t.path(),
                                 "pretrained_model_name_or_path=" + folder, "resolution=16", "num_inference_steps=1",
                                 "prompt=red heart", "run_name=a", "dataset_type=synthetic", "max_sequence_length=12"});
    return maxdiffusion(words);
  };
  Outcome o = run("generate", {"scan_layers=true", "blocks_to_swap=2"});
  EXPECT_EQ(o.status, 0);
  EXPECT_TRUE(contains(o.err, "blocks_to_swap is ignored: a CPU's memory is the host's")) << o.err;
  const auto refused = [&](const char* command, const std::vector<std::string>& words, const std::string& why) {
    o = run(command, words);
    EXPECT_EQ(o.status, 2) << why;
    EXPECT_TRUE(contains(o.err, why)) << o.err;
  };
  refused("generate", {"blocks_to_swap=2"}, "blocks_to_swap is 2 and scan_layers is false; expected scan_layers=true");
  refused("generate", {"scan_layers=true", "blocks_to_swap=99"}, "blocks_to_swap is 99; expected at most ");
  refused("train", {"scan_layers=true", "blocks_to_swap=2"}, "blocks_to_swap needs train_lora: weights in the host's");
}

TEST_F(FewBits, WhatConvertDoesNotWriteIsAnErrorThatSaysWhatItDoes) {
  copy("zimage/base");
  const auto error = [&](const std::string& to, std::vector<std::string> words) {
    const Outcome o = convert(folder, t / to, std::move(words));
    EXPECT_EQ(o.status, 2) << o.err;
    return o.err;
  };
  EXPECT_TRUE(contains(error("a.safetensors", {"dtype=q8_0", "component=transformer"}),
                       "dtype is q8_0, a type of GGUF; expected a name that ends in .gguf"));
  EXPECT_TRUE(
      contains(error("a.gguf", {"dtype=float8_e4m3fn", "component=transformer"}), "of .gguf files q8_0 or q4_0"));
  EXPECT_TRUE(contains(error("a.gguf", {"dtype=q8_1"}), "dtype is 'q8_1'; expected one of: q8_0, q4_0, "));
  EXPECT_TRUE(contains(error("a", {"dtype=float8_e4m3fn"}), "of single .safetensors files float8_e4m3fn"));
  EXPECT_TRUE(contains(error("a.gguf", {"component=vae"}), "have no names in GGUF files"));
  EXPECT_TRUE(contains(error("a.gguf", {"format=diffusers"}), "is GGUF, but format is diffusers"));
}

}  // namespace
}  // namespace md
