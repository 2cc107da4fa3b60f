// The reference's config files by their keys and values (reference_files.tsv): each is read, or rejected with the name
// of the unsupported family. docs/dev/keys.md must list defaults that differ from theirs.
#include <gtest/gtest.h>

#include <algorithm>
#include <fstream>
#include <map>
#include <regex>
#include <set>
#include <sstream>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/base/files.h"
#include "maxdiffusion/base/temporary_folder.h"
#include "maxdiffusion/families/reference_conventions.h"
#include "maxdiffusion/settings/foreign_keys.h"
#include "maxdiffusion/settings/renamed_keys.h"
#include "maxdiffusion/settings/run_config.h"

namespace md {
namespace {

struct Fact {
  std::string key, files, value;  // files: their letters
};

struct Files {
  std::map<char, std::string> names;
  std::vector<Fact> facts;
};

const Files& reference() {
  static const Files files = [] {
    Files f;
    std::ifstream in(MD_SOURCE_DIR "/tests/families/reference_files.tsv");
    for (std::string line; std::getline(in, line);) {
      std::istringstream cells(line);
      Fact fact;
      std::getline(cells, fact.key, '\t'), std::getline(cells, fact.files, '\t'), std::getline(cells, fact.value);
      if (fact.key.size() == 2 && fact.key[0] == '#')
        f.names[fact.key[1]] = fact.files;
      else if (fact.key[0] != '#')
        f.facts.push_back(fact);
    }
    return f;
  }();
  return files;
}

/// The YAML text of the file with this letter.
std::string yaml_of(char letter) {
  std::string yaml;
  for (const Fact& f : reference().facts)
    if (f.files.find(letter) != std::string::npos) yaml += f.key + ": " + f.value + "\n";
  return yaml;
}

const std::map<std::string, std::string> kFamilyThatIsNotHere = {
    {"base_wan_animate.yml", "Wan Animate"},
    {"ltx2_3_video.yml", "LTX-2"},
    {"ltx2_video.yml", "LTX-2"},
    {"ltx_video.yml", "LTX-Video"},
};

TEST(ReferenceFiles, AreReadOrRefusedWithTheFamilyThatIsNotHere) {
  ASSERT_EQ(reference().names.size(), 22u);
  const TemporaryFolder t;
  for (const auto& [letter, name] : reference().names) {
    const std::string file = t / name;
    write_file_atomic(file, yaml_of(letter));
    const auto missing = kFamilyThatIsNotHere.find(name);
    testing::internal::CaptureStderr();
    std::string refusal;
    try {
      RunConfig::load(file, {});
    } catch (const Error& e) {
      refusal = e.what();
    }
    std::istringstream log(testing::internal::GetCapturedStderr());
    // Warnings about members of flash_block_sizes that ours lacks, and about keys without effect.
    for (std::string line; std::getline(log, line);)
      EXPECT_TRUE(line.find("flash_block_sizes: ") != line.npos || line.find(" is ignored: ") != line.npos)
          << name << ": " << line;
    if (missing == kFamilyThatIsNotHere.end()) {
      EXPECT_EQ(refusal, "") << name;
      continue;
    }
    EXPECT_TRUE(refusal.starts_with("config: " + file + ":")) << refusal;
    EXPECT_NE(refusal.find(" of the family " + missing->second + ", which is not supported\n"), std::string::npos)
        << refusal;
    EXPECT_NE(refusal.find("supported families: Stable Diffusion 1 and 2, SDXL, FLUX.1"), std::string::npos);
  }
}

/// The value of one key as `inspect config` prints it.
std::string printed(const std::string& key, const std::string& yaml) {
  RunConfig c;
  KeyList keys;
  keys.add(c);
  keys.assign(ConfigSource::from_text(yaml));
  return std::ranges::find(keys.keys(), key, &ConfigKey::name)->print();
}

/// Rows "| `key` | `there` | `here` | why |" of docs/dev/keys.md, below "default of".
std::map<std::string, std::pair<std::string, std::string>> listed_differences() {
  std::map<std::string, std::pair<std::string, std::string>> rows;
  std::ifstream in(MD_SOURCE_DIR "/docs/dev/keys.md");
  bool inside = false;
  for (std::string line; std::getline(in, line);) {
    if (line.starts_with("| default of | there | here |")) inside = true;
    if (!line.starts_with("|")) inside = false;
    if (!inside || !line.starts_with("| `")) continue;
    std::vector<std::string> code;  // quoted texts of the first three cells
    for (size_t at = line.find('`'); code.size() < 3 && at != std::string::npos; at = line.find('`', at)) {
      const size_t end = line.find('`', at + 1);
      code.push_back(line.substr(at + 1, end - at - 1));
      at = end + 1;
    }
    EXPECT_EQ(code.size(), 3u) << line;
    rows[code.at(0)] = {code.at(1), code.at(2)};
  }
  return rows;
}

/// Whether a cell equals a value, or ends in … and is a prefix of it.
bool same(const std::string& cell, const std::string& value) {
  const std::string dots = "…";
  return cell == value || (cell.ends_with(dots) && value.starts_with(cell.substr(0, cell.size() - dots.size())));
}

// S4-75…77
TEST(ReferenceFiles, DefaultsThatDifferFromTheirsAreListed) {
  // SDXL's file; for keys it lacks, those of Wan 2.1 and FLUX.1 dev.
  std::map<std::string, std::string> theirs;
  for (const char* name : {"base_flux_dev.yml", "base_wan_14b.yml", "base_xl.yml"})
    for (const Fact& f : reference().facts)
      if (std::ranges::any_of(f.files, [&](char letter) { return reference().names.at(letter) == name; }))
        theirs[f.key] = f.value;
  const auto listed = listed_differences();
  std::map<std::string, std::pair<std::string, std::string>> found;
  for (const auto& [key, value] : theirs) {
    const std::string there = printed(key, key + ": " + value), here = printed(key, "");
    if (there != here) found[key] = {there, here};
  }
  for (const auto& [key, values] : found) {
    const auto row = listed.find(key);
    EXPECT_TRUE(row != listed.end() && same(row->second.first, values.first) && same(row->second.second, values.second))
        << "docs/dev/keys.md must list: | `" << key << "` | `" << values.first << "` | `" << values.second
        << "` | why |";
  }
  for (const auto& [key, values] : listed) EXPECT_TRUE(found.contains(key)) << key << " is the same there and here";
}

/// Keys whose values in our files may differ from the reference's files of the same names: those whose reason is in the
/// table, and others.
const std::set<std::string> kForTheReasonOfTheTable = {
    "act_quantization_calibration_method", "bwd_quantization_calibration_method",
    "weight_quantization_calibration_method", "clip_model_name_or_path", "t5xxl_model_name_or_path",
    "controlnet_conditioning_scale", "controlnet_image", "controlnet_model_name_or_path", "data_sharding",
    "dataset_name", "dataset_save_location", "dataset_type", "diffusion_scheduler_config", "from_pt", "hardware",
    "logical_axis_rules", "lora_config", "no_records_per_shard", "output_dir", "revision", "synthetic_num_samples",
    "timestep_bias", "vae_logical_axis_rules",
    // Our table lacks text values, and keeps only the first two numbers of these lists.
    "prompt", "prompt_2", "negative_prompt", "mag_ratios_base", "mag_ratios_base_480p", "mag_ratios_base_720p"};
const std::map<std::string, std::string> kForOtherReasons = {
    {"attention", "tokamax_flash is another name of flash"},
    {"flash_block_sizes", "without the members that are ignored; of Wan none, since sizes by chip are built in"},
    {"gcs_metrics", "there is no bucket of ours"},
    {"grain_worker_count", "0: as many as there are cores"},
    {"guidance_rescale", "-1 and 0 are both off"},
    {"log_period", "of gcs_metrics"},
    {"offload_encoders", "no effect"},
    {"output_file", "no effect"},
    {"sharding", "no effect"},
    {"skip_jax_distributed_system", "no effect"},
    {"num_train_epochs", "max_train_steps counts"},
    {"ulysses_shards", "no effect"},
    {"use_base2_exp", "no effect"},
    {"use_experimental_scheduler", "no effect"},
};

/// Files whose reference program does not train and ignores these keys.
const std::set<std::string> kUnusedThere = {"ici_data_parallelism", "learning_rate_schedule_steps", "max_train_steps",
                                            "run_name"};

bool trained_here(const std::string& name) {
  return name.starts_with("base_zimage") || name.starts_with("base_flux2klein");
}

TEST(ReferenceFiles, OurFilesOfTheSameNamesSayTheSame) {
  int compared = 0;
  for (const auto& [letter, name] : reference().names) {
    const std::string ours = std::string(MD_SOURCE_DIR "/configs/") + name;
    if (!exists(ours)) continue;
    RunConfig c;
    KeyList keys;
    keys.add(c);
    keys.assign(ConfigSource::load(ours, {}));
    ++compared;
    std::set<std::string> unread;
    for (const FamilyKeys& family : keys_of_families()) unread.insert(family.unread.begin(), family.unread.end());
    for (const Fact& f : reference().facts) {
      if (f.files.find(letter) == std::string::npos || unread.contains(f.key) ||
          kForTheReasonOfTheTable.contains(f.key) || kForOtherReasons.contains(f.key) ||
          (trained_here(name) && kUnusedThere.contains(f.key)))
        continue;
      EXPECT_EQ(std::ranges::find(keys.keys(), f.key, &ConfigKey::name)->print(),
                printed(f.key, f.key + ": " + f.value))
          << name << ": " << f.key;
    }
  }
  EXPECT_EQ(compared, 17);
}

std::set<std::string> names_of_keys() {
  RunConfig c;
  KeyList keys;
  keys.add(c);
  std::set<std::string> names;
  for (const ConfigKey& key : keys.keys()) names.insert(key.name);
  return names;
}

TEST(ForeignKeys, AreNoneOfOursAndNameOneOfOurs) {
  const std::set<std::string> ours = names_of_keys();
  EXPECT_GE(foreign_keys().size(), 150u);
  for (const auto& [theirs, hint] : foreign_keys()) {
    EXPECT_FALSE(ours.contains(theirs)) << theirs;
    if (!hint.starts_with("here it is")) continue;
    const size_t from = hint.find('`') + 1;
    EXPECT_TRUE(ours.contains(hint.substr(from, hint.find('`', from) - from))) << hint;
  }
  EXPECT_EQ(foreign_keys().at("train_batch_size"), "here it is `per_device_batch_size`");
  EXPECT_EQ(foreign_keys().at("resume_from_checkpoint"), "no key is needed: the same command again resumes the run");
  EXPECT_EQ(foreign_keys().at("gradient_checkpointing"), "here it is `remat_policy`, as in remat_policy=FULL");
}

TEST(ForeignKeys, FlagsOnThePageOfOtherProgramsAreKeysOrHaveAHint) {
  std::set<std::string> known = names_of_keys();
  for (const KeyRename& rename : renamed_keys()) known.insert(rename.former);
  for (const auto& [theirs, hint] : foreign_keys()) known.insert(theirs);
  std::istringstream page(read_file(MD_SOURCE_DIR "/docs/coming_from.md"));
  int flags = 0;
  for (std::string line; std::getline(page, line);) {
    const std::string theirs = line.starts_with("| ") ? line.substr(2, line.find(" | ", 2) - 2) : "";
    static const std::regex flag("`--([a-z0-9_-]+)");
    for (std::sregex_iterator it(theirs.begin(), theirs.end(), flag), end; it != end; ++it, ++flags) {
      std::string name = (*it)[1];
      std::ranges::replace(name, '-', '_');
      EXPECT_TRUE(known.contains(name)) << name;
    }
  }
  EXPECT_GE(flags, 128);
}

}  // namespace
}  // namespace md
