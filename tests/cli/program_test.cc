// The program's command line: help, exit statuses, and error messages for invalid words.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <filesystem>

#include "maxdiffusion/base/version.h"
#include "tests/cli/command.h"

namespace md {
namespace {

const std::string kQuickstart = MD_SOURCE_DIR "/configs/quickstart.yml";

TEST(Program, WithoutWordsSaysWhatItCanDo) {
  Outcome o = maxdiffusion({});
  EXPECT_EQ(o.status, 0);
  EXPECT_TRUE(contains(o.out, "prepare_emoji FOLDER")) << o.out;
  EXPECT_TRUE(contains(o.out, "prepare_moving_emoji FOLDER")) << o.out;
  EXPECT_EQ(maxdiffusion({"help"}).out, o.out);
  EXPECT_EQ(maxdiffusion({"--help"}).out, o.out);
}

TEST(Program, HelpOfACommandIsItsUsageAndItsKeysByGroup) {
  const Outcome o = maxdiffusion({"train", "--help"});
  EXPECT_EQ(o.status, 0);
  EXPECT_TRUE(o.out.starts_with("usage: maxdiffusion train CONFIG [key=value …]\ntrain a model as the config says"))
      << o.out.substr(0, 200);
  for (const char* title : {"run", "devices", "model", "data", "training", "DreamBooth", "LoRA", "samples"})
    EXPECT_TRUE(contains(o.out, std::string("\n\n") + title + ":\n  ")) << title;
  EXPECT_TRUE(contains(o.out, "\n  learning_rate: 1e-05  # "));
  EXPECT_EQ(maxdiffusion({"help", "train"}).out, o.out);
  EXPECT_EQ(maxdiffusion({"train", "a.yml", "-h"}).out, o.out);
  EXPECT_TRUE(maxdiffusion({"train_sdxl", "--help"}).out == o.out);
  const std::string generate = maxdiffusion({"generate", "-h"}).out;
  EXPECT_TRUE(contains(generate, "\n  num_inference_steps: ")) << generate;
  EXPECT_FALSE(contains(generate, "learning_rate")) << generate;
  EXPECT_TRUE(contains(maxdiffusion({"help", "convert"}).out, "\nkeys:\n  "));
  EXPECT_TRUE(contains(maxdiffusion({"help", "lora"}).out, "\n\nresize:\n  "));
  const std::string clips = maxdiffusion({"prepare_moving_emoji", "--help"}).out;
  EXPECT_TRUE(contains(clips, "  resolution: 64  # pixels per side\n  num_frames: 17  # frames of each clip\n"))
      << clips;
  EXPECT_TRUE(contains(maxdiffusion({"help", "trian"}).err, "did you mean 'train'?"));
}

TEST(Program, ShellsCompleteCommandsAndKeys) {
  Outcome o = maxdiffusion({"completion", "bash"});
  EXPECT_EQ(o.status, 0) << o.err;
  TemporaryFolder folder;
  write_file_atomic(folder / "completion", o.out);
  // Bash completions for the words so far, the last of which is incomplete.
  const auto offered = [&](const std::string& words) {
    return shell("PATH=" MD_BINARY_DIR ":$PATH bash -c 'complete() { :; }; . " + (folder / "completion") +
                 "; COMP_WORDS=(maxdiffusion " + words +
                 "); COMP_CWORD=$((${#COMP_WORDS[@]} - 1)); _maxdiffusion; echo ${COMPREPLY[*]}'")
        .out;
  };
  EXPECT_EQ(offered("prepare_t"), "prepare_tfrecords\n");
  EXPECT_EQ(offered("gener"), "generate generate_controlnet\n");
  EXPECT_EQ(offered("train a.yml learning_r"), "learning_rate= learning_rate_schedule_steps=\n");
  EXPECT_EQ(offered("generate a.yml learning_r"), "\n") << "it reads no such key";
  EXPECT_EQ(offered("train configs/qui"), "\n") << "files are the shell's";
  o = maxdiffusion({"completion", "zsh"});
  EXPECT_TRUE(o.out.starts_with("#compdef maxdiffusion\n")) << o.out;
  o = maxdiffusion({"completion", "fish"});
  EXPECT_EQ(o.status, 2);
  EXPECT_TRUE(contains(o.err, "completion: expected bash or zsh")) << o.err;
}

TEST(Program, AConfigThatIsNotThereIsTheOneThatCameWithIt) {
  TemporaryFolder folder;
  const std::string program = "cd " + folder.path() + " && " MD_BINARY_DIR "/maxdiffusion inspect config ";
  Outcome o = shell(program + "configs/quickstart.yml");
  EXPECT_EQ(o.status, 0) << o.err;
  EXPECT_TRUE(contains(o.err, "configs/quickstart.yml is " MD_SOURCE_DIR "/configs/quickstart.yml, installed with"))
      << o.err;
  EXPECT_TRUE(contains(o.out, "\npretrained_model_name_or_path: " MD_SOURCE_DIR "/configs/models/emoji\n")) << o.out;
  make_folders(folder / "configs");
  write_file_atomic(folder / "configs/quickstart.yml", "seed: 7\n");
  o = shell(program + "configs/quickstart.yml");
  EXPECT_TRUE(contains(o.out, "\nseed: 7\n")) << o.out << "one's own is nearer";
  o = shell(program + "configs/nothing.yml");
  EXPECT_EQ(o.status, 2);
  EXPECT_TRUE(contains(o.err, "config: cannot read configs/nothing.yml")) << o.err;
  EXPECT_TRUE(contains(o.err, "try: a config file such as configs/quickstart.yml, or the folder of a run")) << o.err;
}

TEST(Program, WhatItPrintsAndCannotWriteIsAnIoError) {
  for (const char* words : {"inspect keys", "help", "version", "train --help"}) {
    const Outcome o = shell(std::string(MD_BINARY_DIR "/maxdiffusion ") + words + " >/dev/full");
    EXPECT_EQ(o.status, 4) << words;
    EXPECT_EQ(o.err, "error: standard output cannot be written: No space left on device\n") << words;
  }
}

TEST(Program, KeysMayBeWrittenAsOptions) {
  TemporaryFolder folder;
  write_file_atomic(folder / "a.yml", "");
  const Outcome o = maxdiffusion({"inspect", "config", folder / "a.yml", "--prompt", "a red cat", "--seed=3",
                                  "--enable-profiler", "--max_train_steps", "5", "sample_seed=4"});
  EXPECT_EQ(o.status, 0) << o.err;
  for (const char* line :
       {"prompt: [\"a red cat\"]", "seed: 3", "enable_profiler: true", "max_train_steps: 5", "sample_seed: 4"})
    EXPECT_TRUE(contains(o.out, std::string("\n") + line + "\n")) << line << "\n" << o.out;
  EXPECT_TRUE(contains(maxdiffusion({"prepare_emoji", folder / "b", "--resolution", "big"}).err,
                       "resolution is `big`, expected a whole number"));
}

TEST(Program, TheConfigComesFirstAndOnce) {
  Outcome o = maxdiffusion({"generate", "prompt=x", "configs/a.yml"});
  EXPECT_EQ(o.status, 2);
  EXPECT_EQ(o.err,
            "error: generate: expected the config file before keys, found 'prompt=x'\n  try: maxdiffusion generate "
            "configs/a.yml "
            "prompt=x …\n");
  o = maxdiffusion({"train", kQuickstart, "b.yml"});
  EXPECT_EQ(o.status, 2);
  EXPECT_TRUE(contains(o.err, "'b.yml' is not of the form key=value\n  a command takes one config file; `base: "))
      << o.err;
}

TEST(Program, AConfigIsReadFromAnyFolder) {
  TemporaryFolder folder;
  const std::string there = "cd " + folder.path() + " && " MD_BINARY_DIR "/maxdiffusion inspect config ";
  const Outcome o = shell(there + kQuickstart);
  EXPECT_EQ(o.status, 0) << o.err;
  EXPECT_TRUE(contains(o.out, "\npretrained_model_name_or_path: " MD_SOURCE_DIR "/configs/models/emoji\n")) << o.out;
  EXPECT_TRUE(contains(o.out, "\noutput_dir: " + folder.path() + "/runs\n")) << o.out;
  write_file_atomic(folder / "saved.yml", o.out);  // as a run saves it
  EXPECT_EQ(shell("cd / && " MD_BINARY_DIR "/maxdiffusion inspect config " + (folder / "saved.yml")).out, o.out);
}

// P-14
TEST(Program, SaysItsVersion) {
  const Outcome o = maxdiffusion({"--version"});
  EXPECT_EQ(maxdiffusion({"-v"}).out, o.out);
  EXPECT_EQ(maxdiffusion({"version"}).out, o.out);
  EXPECT_EQ(o.status, 0);
  EXPECT_EQ(o.out, std::string("maxdiffusion ") + version() + "\n");
  EXPECT_TRUE(maxdiffusion({"help"}).out.starts_with(o.out));
  for (const auto& words : std::vector<std::vector<std::string>>{{"version", "x"}, {"help", "train", "x"}}) {
    const Outcome refused = maxdiffusion(words);
    EXPECT_EQ(refused.status, 2);
    EXPECT_TRUE(contains(refused.err, "found 'x' after it; expected nothing")) << refused.err;
  }
}

TEST(Program, UnknownCommandNamesTheNearest) {
  Outcome o = maxdiffusion({"prepare_emojis"});
  EXPECT_EQ(o.status, 2);
  EXPECT_EQ(o.out, "");
  EXPECT_EQ(o.err,
            "error: there is no command 'prepare_emojis'\n  did you mean 'prepare_emoji'?\n  try: maxdiffusion help\n");
  EXPECT_FALSE(contains(maxdiffusion({"frobnicate"}).err, "did you mean"));
}

// S0-90, S4-1
TEST(Program, TheReferencesNamesOfProgramsAreKnown) {
  // They equal our names: the same config fails with the same message at the same point.
  auto refusal = [](const std::string& name, const std::string& word) {
    const Outcome o = maxdiffusion({name, MD_SOURCE_DIR "/configs/quickstart.yml", word});
    const size_t at = o.err.find("error: ");
    return at == o.err.npos ? "none: " + o.err : fmt::format("{} {}", o.status, o.err.substr(at));
  };
  for (const auto& [name, ours, word, message] :
       {std::tuple{"train_sdxl", "train", "run_name=", "2 error: run_name is empty"},
        {"train_sd", "train", "run_name=", "2 error: run_name is empty"},
        {"train_sdxl", "train", "pretrained_model_name_or_path=/nowhere",
         "4 error: there is no file or folder '/nowhere'"},
        {"generate_sdxl", "generate", "pretrained_model_name_or_path=/nowhere",
         "4 error: there is no file or folder '/nowhere'"},
        {"generate_sd", "generate", "pretrained_model_name_or_path=/nowhere",
         "4 error: there is no file or folder '/nowhere'"},
        {"generate_lightning", "generate", "pretrained_model_name_or_path=/nowhere",
         "4 error: there is no file or folder '/nowhere'"},
        {"generate_controlnet_sdxl_replicated", "generate_controlnet",
         "controlnet_model_name_or_path=", "2 error: there is no checkpoint of the run 'quickstart'"},
        {"generate_controlnet_replicated", "generate_controlnet",
         "controlnet_model_name_or_path=", "2 error: there is no checkpoint of the run 'quickstart'"}}) {
    EXPECT_EQ(refusal(name, word), refusal(ours, word)) << name;
    EXPECT_TRUE(refusal(name, word).starts_with(message)) << refusal(name, word);
  }
}

TEST(Program, PrepareEmojiRefusesBadWords) {
  EXPECT_TRUE(contains(maxdiffusion({"prepare_emoji"}).err, "the folder to write to is missing"));
  TemporaryFolder folder;
  Outcome o = maxdiffusion({"prepare_emoji", folder / "a", "resolutoin=32"});
  EXPECT_EQ(o.status, 2);
  EXPECT_TRUE(contains(o.err, "command line: there is no key `resolutoin`")) << o.err;
  EXPECT_TRUE(contains(o.err, "did you mean `resolution`?")) << o.err;
  o = maxdiffusion({"prepare_emoji", folder / "a", "resolution=big"});
  EXPECT_EQ(o.status, 2);
  EXPECT_TRUE(contains(o.err, "resolution is `big`, expected a whole number")) << o.err;
  EXPECT_TRUE(contains(maxdiffusion({"prepare_emoji", "--resolution", "32"}).err,
                       "expected the folder to write to before keys, found '--resolution'"));
  o = maxdiffusion({"prepare_emoji", folder / "a", "resolution"});
  EXPECT_EQ(o.status, 2);
  EXPECT_TRUE(contains(maxdiffusion({"prepare_moving_emoji"}).err, "the folder to write to is missing"));
  o = maxdiffusion({"prepare_moving_emoji", folder / "a", "resolution=33"});
  EXPECT_EQ(o.status, 2);
  EXPECT_TRUE(contains(o.err, "resolution: 33; expected an even number")) << o.err;
  EXPECT_FALSE(exists(folder / "a"));
}

/// Trains the quickstart into `folder` with these keys.
Outcome train(const TemporaryFolder& folder, std::vector<std::string> words) {
  words.insert(words.begin(),
               {"train", kQuickstart, "output_dir=" + (folder / "runs"), "dataset_save_location=" + (folder / "data"),
                "pretrained_model_name_or_path=" MD_SOURCE_DIR "/configs/models/emoji"});
  return maxdiffusion(words);
}

// P-11
TEST(Program, InspectPrintsAConfigThatReadsBack) {
  TemporaryFolder folder;
  Outcome o = maxdiffusion({"inspect", "config", kQuickstart, "learning_rate=3e-4"});
  EXPECT_EQ(o.status, 0) << o.err;
  EXPECT_TRUE(contains(o.out, "\nlearning_rate: 0.0003\n")) << o.out;
  write_file_atomic(folder / "a.yml", o.out);
  EXPECT_EQ(maxdiffusion({"inspect", "config", folder / "a.yml"}).out, o.out);
  EXPECT_EQ(maxdiffusion({"inspect"}).status, 2);
  o = maxdiffusion({"inspect", "nothing", kQuickstart});
  EXPECT_EQ(o.status, 2);
  EXPECT_TRUE(contains(
      o.err, "'nothing' is not one of: keys, config, image, mesh, plan, params, batch, graph, program, memory"));
}

// S3-28, P-11
TEST(Program, InspectPrintsEachStageOfARun) {
  auto inspect = [](const char* what, const std::vector<std::string>& extra = {}) {
    std::vector<std::string> words = {"inspect", what, kQuickstart,
                                      "pretrained_model_name_or_path=" MD_SOURCE_DIR "/configs/models/emoji"};
    words.insert(words.end(), extra.begin(), extra.end());
    const Outcome o = maxdiffusion(words);
    EXPECT_EQ(o.status, 0) << what << "\n" << o.err;
    return o.out;
  };
  const std::string mesh =
      inspect("mesh", {"cpu_device_count=8", "ici_data_parallelism=2", "ici_tensor_parallelism=4"});
  EXPECT_TRUE(contains(mesh, "data 2 × tensor 4 (8 devices)")) << mesh;
  EXPECT_TRUE(contains(mesh, "  data: 2\n")) << mesh;
  EXPECT_TRUE(contains(mesh, "device 5 (cpu): process 0, slice 0, at [1, 0, 0, 1]")) << mesh;
  const std::string plan = inspect("plan", {"per_device_batch_size=3", "cpu_device_count=2", "output_dir=/nowhere"});
  for (const char* line : {"folder: /nowhere/quickstart\n", "data: images, encoded once\n", "size: 48x48\n",
                           "batch: 6\n", "steps: 1680\n", "trained: unet\n"})
    EXPECT_TRUE(contains(plan, line)) << line << plan;
  const std::string params = inspect("params");
  EXPECT_TRUE(contains(params, "\nunet/conv_out.weight f32[4,64,3,3] [")) << params.substr(0, 500);
  EXPECT_TRUE(contains(params, "unet: 5850020 trained, 0 frozen\n"));
  const std::string batch = inspect("batch", {"per_device_batch_size=3", "cpu_device_count=2"});
  EXPECT_TRUE(contains(batch, "moments f32[6,12,12,8]\n")) << batch;
  EXPECT_TRUE(contains(batch, "empty_text_embeds f32[128] (the same every step)\n")) << batch;
  EXPECT_TRUE(contains(inspect("graph"), "module @train"));
  const std::string program = inspect("program");
  EXPECT_TRUE(contains(program, "in  unet/conv_out.weight f32[4,64,3,3] [-, -, -, -]\n")) << program.substr(0, 500);
  EXPECT_TRUE(contains(program, "\nout loss\n"));
  EXPECT_TRUE(contains(inspect("memory"), "training step: memory per device 0."));
}

TEST(Program, SaysOnceThatACpuKeepsWhatAPolicyOffloads) {
  auto message = [](const char* policy) {
    const Outcome o = maxdiffusion({"inspect", "graph", kQuickstart, std::string("remat_policy=") + policy,
                                    "pretrained_model_name_or_path=" MD_SOURCE_DIR "/configs/models/emoji"});
    EXPECT_EQ(o.status, 0) << o.err;
    const std::string line = "remat_policy: offloading is ignored on CPUs";
    int times = 0;
    for (size_t at = o.err.find(line); at != o.err.npos; at = o.err.find(line, at + 1)) ++times;
    return times;
  };
  EXPECT_EQ(message("HIDDEN_STATE_WITH_OFFLOAD"), 1);
  EXPECT_EQ(message("MATMUL_WITHOUT_BATCH"), 0);
}

// P-11
TEST(Program, InspectPrintsEveryKeyWithItsDefaultAsAConfig) {
  TemporaryFolder folder;
  const Outcome o = maxdiffusion({"inspect", "keys"});
  EXPECT_EQ(o.status, 0) << o.err;
  EXPECT_TRUE(contains(o.out, "\nadam_b1: 0.9  # decay of the first moment [at least 0 and below 1]\n")) << o.out;
  write_file_atomic(folder / "keys.yml", o.out);
  write_file_atomic(folder / "empty.yml", "");
  const Outcome all = maxdiffusion({"inspect", "config", folder / "keys.yml"});
  EXPECT_EQ(all.status, 0) << all.err;
  EXPECT_EQ(all.out, maxdiffusion({"inspect", "config", folder / "empty.yml"}).out);
}

TEST(Program, EveryConfigOfTheProjectIsRead) {
  int read = 0;
  for (const auto& f : std::filesystem::directory_iterator(MD_SOURCE_DIR "/configs")) {
    if (f.path().extension() != ".yml") continue;
    const Outcome o = maxdiffusion({"inspect", "config", f.path().string()});
    EXPECT_EQ(o.status, 0) << f.path() << "\n" << o.err;
    EXPECT_EQ(o.err, "") << f.path();
    ++read;
  }
  EXPECT_GE(read, 7);
}

// S3-28
TEST(Program, BadConfigsAreRefusedWithFileLineAndKey) {
  TemporaryFolder folder;
  write_file_atomic(folder / "a.yml", "base: " + kQuickstart + "\n\nlearning_rat: 1e-4\n");
  Outcome o = maxdiffusion({"train", folder / "a.yml"});
  EXPECT_EQ(o.status, 2);
  EXPECT_EQ(o.err, "error: config: " + (folder / "a.yml") +
                       ":3: there is no key `learning_rat`\n  did you mean `learning_rate`?\n");
  write_file_atomic(folder / "b.yml", "base: " + kQuickstart + "\nmax_train_steps: some\n");
  o = maxdiffusion({"train", folder / "b.yml"});
  EXPECT_EQ(o.status, 2);
  EXPECT_EQ(o.err, "error: config: " + (folder / "b.yml") +
                       ":2: max_train_steps is `some`, expected a whole number, -1 or more\n"
                       "  max_train_steps: optimizer updates; -1: num_train_epochs passes over the data\n");
  // The error of a multi-line value names the line of its key.
  write_file_atomic(folder / "c.yml", "base: " + kQuickstart + "\ntimesteps_list:\n  [1,\n   two]\n");
  o = maxdiffusion({"train", folder / "c.yml"});
  EXPECT_EQ(o.status, 2);
  EXPECT_TRUE(o.err.starts_with("error: config: " + (folder / "c.yml") + ":2: timesteps_list")) << o.err;
  EXPECT_TRUE(contains(maxdiffusion({"train", folder / "none.yml"}).err, folder / "none.yml"));
  EXPECT_TRUE(contains(maxdiffusion({"train"}).err, "the config file is missing"));
  const std::string model = MD_SOURCE_DIR "/tests/golden/pipelines/sd";
  const std::string refused = maxdiffusion({"train", model}).err;
  EXPECT_TRUE(contains(refused, "train: '" + model + "' is a model; expected a config file")) << refused;
  EXPECT_TRUE(contains(refused, "train CONFIG.yml pretrained_model_name_or_path=" + model)) << refused;
  EXPECT_TRUE(contains(train(folder, {"seeed=1"}).err, "command line: there is no key `seeed`"));
  EXPECT_TRUE(contains(train(folder, {"seed"}).err, "'seed' is not of the form key=value"));
  EXPECT_FALSE(exists(folder / "runs"));
}

TEST(Program, MissingDataIsAnIoErrorThatNamesTheFolder) {
  TemporaryFolder folder;
  Outcome o = train(folder, {"dataset_name=", "train_data_dir=/nowhere/pictures"});
  EXPECT_EQ(o.status, 4) << o.err;
  EXPECT_TRUE(contains(o.err, "/nowhere/pictures")) << o.err;
  make_folders(folder / "empty");
  o = train(folder, {"dataset_name=", "train_data_dir=" + (folder / "empty")});
  EXPECT_EQ(o.status, 4) << o.err;
  EXPECT_TRUE(contains(o.err, folder / "empty")) << o.err;
}

TEST(Program, ADatasetThatIsGeneratedNeedsAFolder) {
  TemporaryFolder folder;
  const Outcome o = train(folder, {"dataset_name=noto-emoji", "dataset_save_location="});
  EXPECT_EQ(o.status, 2) << o.err;
  EXPECT_TRUE(contains(o.err, "dataset_save_location is empty; expected a folder for dataset_name=noto-emoji"))
      << o.err;
}

// S1-52
TEST(Program, BadMeshesAndPluginsAreRefused) {
  TemporaryFolder folder;
  Outcome o = train(folder, {"ici_data_parallelism=-1", "ici_fsdp_parallelism=-1"});
  EXPECT_EQ(o.status, 2) << o.err;
  EXPECT_TRUE(contains(o.err, "Found unspecified values (-1) for more than one ICI parallelism axis")) << o.err;
  o = train(folder, {"plugin=/nowhere/plugin.so"});
  EXPECT_EQ(o.status, 4) << o.err;
  EXPECT_TRUE(contains(o.err, "/nowhere/plugin.so")) << o.err;
}

TEST(Program, FilesThatAreNotThereAreIoErrors) {
  TemporaryFolder folder;
  Outcome o = maxdiffusion({"prepare_emoji", folder / "a", "font=/nowhere/font.ttf"});
  EXPECT_EQ(o.status, 4);
  EXPECT_TRUE(contains(o.err, "/nowhere/font.ttf")) << o.err;
  o = train(folder, {"clip_bpe_file=/nowhere/merges.gz"});
  EXPECT_EQ(o.status, 4);
  EXPECT_TRUE(contains(o.err, "/nowhere/merges.gz")) << o.err;
}

}  // namespace
}  // namespace md
