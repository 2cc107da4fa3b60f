// Data sources of a run: buckets, and TFRecord files that the program wrote, train exactly as the folder of their
// images does. Uses tiny model folders and the real program.
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <nlohmann/json.hpp>
#include <thread>

#include "maxdiffusion/base/parse_json.h"
#include "maxdiffusion/data/records/open_source.h"
#include "maxdiffusion/media/image.h"
#include "tests/bucket_server.h"
#include "tests/cli/command.h"

namespace md {
namespace {

namespace fs = std::filesystem;
const std::string kModels = MD_SOURCE_DIR "/tests/golden/";

class DataRuns : public testing::Test {
 protected:
  static constexpr int kImages = 5;
  DataRuns() {
    make_folders(t / "pictures");
    for (int i = 0; i < kImages; ++i) {
      HostArray rgb(Shape{DType::u8, {16, 16, 3}});
      auto v = rgb.mutable_view<uint8_t>();
      for (size_t k = 0; k < v.size(); ++k) v[k] = static_cast<uint8_t>(41 * i + static_cast<int>(k % 48) * 5);
      write_png(t / ("pictures/" + std::to_string(i) + ".png"), rgb);
      write_file_atomic(t / ("pictures/" + std::to_string(i) + ".txt"), "heart " + std::to_string(i));
    }
  }
  Outcome run(const std::string& command, const std::string& name, const std::vector<std::string>& extra) {
    std::vector<std::string> words = {command,
                                      MD_SOURCE_DIR "/tests/pipelines/generate.yml",
                                      "run_name=" + name,
                                      "output_dir=" + t.path(),
                                      "pretrained_model_name_or_path=" + model,
                                      "train_data_dir=" + (t / "pictures"),
                                      "resolution=16",
                                      "per_device_batch_size=2",
                                      "max_train_steps=3",
                                      "learning_rate=1e-3",
                                      "enable_data_shuffling=false",
                                      "diffusion_scheduler_config={_class_name: DDIMScheduler}",
                                      "xla_flags=--xla_backend_optimization_level=0"};
    words.insert(words.end(), extra.begin(), extra.end());
    return maxdiffusion(words);
  }
  std::vector<double> trained(const std::string& name, const std::vector<std::string>& extra) {
    const Outcome o = run("train", name, extra);
    EXPECT_EQ(o.status, 0) << o.err;
    EXPECT_EQ(o.err.find("inaliz"), std::string::npos) << o.err;  // Arrow warns if its S3 client is not closed
    const std::vector<double> out = losses(name);
    EXPECT_EQ(out.size(), 3u) << name;
    return out;
  }
  std::vector<double> losses(const std::string& name) {
    std::vector<double> out;
    std::ifstream f(t / (name + "/metrics.jsonl"));
    for (std::string line; std::getline(f, line);) out.push_back(parse_json(line)["loss"]);
    return out;
  }
  static void expect_near(const std::vector<double>& found, const std::vector<double>& expected, double tolerance) {
    ASSERT_EQ(found.size(), expected.size());
    for (size_t i = 0; i < found.size(); ++i) EXPECT_NEAR(found[i], expected[i], tolerance * expected[i]) << i;
  }
  /// A copy of a golden folder whose autoencoder has almost no variance: the deviation is e⁻¹⁵. `last`: the layer that
  /// outputs the moments.
  std::string certain(const std::string& name, const std::string& last = "quant_conv") {
    std::string copy = t / "certain", file = copy + "/vae/diffusion_pytorch_model.safetensors";
    fs::copy(kModels + name, copy, fs::copy_options::recursive);
    std::string bytes = read_file(file);
    uint64_t head = 0;
    std::memcpy(&head, bytes.data(), sizeof head);
    const auto header = parse_json(bytes.substr(8, head));
    for (const char* part : {"weight", "bias"}) {
      const auto& tensor = header.at(last + "." + part);
      const size_t begin = 8 + head + tensor["data_offsets"][0].get<size_t>(),
                   end = 8 + head + tensor["data_offsets"][1].get<size_t>();
      EXPECT_EQ(tensor["dtype"], "BF16");
      const uint16_t value = part == std::string("bias") ? 0xC1F0 : 0;  // −30
      for (size_t at = (begin + end) / 2; at < end; at += 2)  // the second half of the channels: log-variances
        std::memcpy(&bytes[at], &value, sizeof value);
    }
    write_file_atomic(file, bytes);
    return copy;
  }
  TemporaryFolder t;
  std::string model = kModels + "pipelines/sd";
};

TEST_F(DataRuns, BucketsAreTrainedFromAsFoldersAre) {
  BucketServer server;
  server.put_files("set", "pictures", t / "pictures");
  for (const auto& [name, value] :
       std::vector<std::pair<const char*, std::string>>{{"AWS_ENDPOINT_URL", "http://" + server.address()},
                                                        {"AWS_ACCESS_KEY_ID", "reader"},
                                                        {"AWS_SECRET_ACCESS_KEY", "hush"},
                                                        {"AWS_EC2_METADATA_DISABLED", "true"},
                                                        {"STORAGE_EMULATOR_HOST", "http://" + server.address()},
                                                        {"no_proxy", "127.0.0.1"}})
    ::setenv(name, value.c_str(), 1);
  const auto local = trained("local", {}), uncached = trained("step", {"cache_latents_text_encoder_outputs=false"});
  for (const std::string scheme : {"s3", "gs"}) {
    const std::string where = "train_data_dir=" + scheme + "://set/pictures";
    EXPECT_EQ(trained(scheme, {where}), local);
    EXPECT_EQ(trained(scheme + "_step", {where, "cache_latents_text_encoder_outputs=false"}), uncached);
    Outcome o = run("train", "none", {"train_data_dir=" + scheme + "://set/none"});
    EXPECT_EQ(o.status, 4) << o.err;
    EXPECT_TRUE(contains(o.err, scheme + "://set/none'")) << o.err;
    EXPECT_FALSE(contains(o.err, "hush") || contains(o.err, "inaliz")) << o.err;
    o = run("train", "key", {"train_data_dir=" + scheme + "://who:hush@set/pictures"});
    EXPECT_EQ(o.status, 2) << o.err;
    EXPECT_FALSE(contains(o.err, "hush")) << o.err;
    // The connection fails while threads read ahead: an error, not a crash.
    server.fail(BucketServer::Fault::truncate, 1 << 20);
    o = run("train", "lost", {where + "?retry_limit_seconds=1", "cache_latents_text_encoder_outputs=false"});
    if (scheme == "s3") o = run("train", "lost", {where, "cache_latents_text_encoder_outputs=false"});
    server.fail(BucketServer::Fault::none, 0);
    EXPECT_EQ(o.status, 4) << o.err;
    EXPECT_TRUE(contains(o.err, scheme + "://set/pictures/")) << o.err;
  }
}

TEST_F(DataRuns, TfrecordsOfOneTextEncoderTrainAsTheFolderDoes) {
  const auto folder = trained("folder", {});
  Outcome o = run("prepare_tfrecords", "", {"tfrecords_dir=" + (t / "set"), "no_records_per_shard=2"});
  ASSERT_EQ(o.status, 0) << o.err;
  EXPECT_TRUE(contains(o.out, "5 records in " + (t / "set"))) << o.out;
  for (const char* file : {"file_00-2.tfrec", "file_01-4.tfrec", "file_02-6.tfrec"})
    EXPECT_TRUE(exists(t / ("set/" + std::string(file)))) << file;
  expect_near(trained("records", {"dataset_type=tfrecord", "train_data_dir=" + (t / "set")}), folder, 1e-5);

  o = run("prepare_tfrecords", "", {"tfrecords_dir=" + (t / "set")});
  EXPECT_EQ(o.status, 4);
  EXPECT_TRUE(contains(o.err, "not empty; expected a new folder")) << o.err;
  for (const auto& [word, says] : std::vector<std::pair<std::string, std::string>>{
           {"no_records_per_shard=0", "no_records_per_shard is 0"}, {"tfrecords_dir=", "tfrecords_dir is empty"}}) {
    o = run("prepare_tfrecords", "", {"tfrecords_dir=" + (t / "other"), word});
    EXPECT_EQ(o.status, 2);
    EXPECT_TRUE(contains(o.err, says)) << o.err;
  }
}

TEST_F(DataRuns, CheckReadsAllEncodedRecordsAsTrainingDoes) {
  Outcome o = run("prepare_tfrecords", "", {"tfrecords_dir=" + (t / "set"), "no_records_per_shard=2"});
  ASSERT_EQ(o.status, 0) << o.err;
  const std::string last = t / "set/file_02-6.tfrec", whole = read_file(last);
  const auto checked = [&](const std::string& bytes, const std::vector<std::string>& keys) {
    write_file_atomic(last, bytes);
    std::vector<std::string> words = {"dataset_type=tfrecord"};
    words.insert(words.end(), keys.begin(), keys.end());
    return run("check", "checked", words);
  };
  const std::string set = "train_data_dir=" + (t / "set");
  o = checked(whole, {set});
  EXPECT_EQ(o.status, 0) << o.err;
  EXPECT_TRUE(contains(o.err, "5 encoded records")) << o.err;
  std::string flipped = whole;
  flipped[whole.size() / 2] ^= 1;
  for (const auto& [bytes, says] :
       std::vector<std::pair<std::string, std::string>>{{flipped, "its checksum is wrong: the file is damaged"},
                                                        {whole.substr(0, whole.size() - 1), "the file is truncated"},
                                                        {whole + "x", "the file is truncated"},
                                                        {"\xff" + whole.substr(1), "its first length is damaged"}}) {
    o = checked(bytes, {set});
    EXPECT_EQ(o.status, 4) << says << "\n" << o.err;
    EXPECT_TRUE(contains(o.err, says) && contains(o.err, "file_02-6.tfrec")) << o.err;
  }
}

// S2-80, S2-82
TEST_F(DataRuns, TfrecordsForEvaluationHaveTimesteps) {
  const std::vector<std::string> words = {"tfrecords_dir=" + (t / "set"), "enable_eval_timesteps=true",
                                          "num_eval_samples=4", "timesteps_list=250,750"};
  Outcome o = run("prepare_tfrecords", "", words);
  ASSERT_EQ(o.status, 0) << o.err;
  EXPECT_TRUE(contains(o.out, "4 records")) << o.out;
  RecordStream stream(
      open_source(
          {.dataset_type = "tfrecord", .train_data_dir = t / "set", .array_columns = {"timesteps", "moments|latents"}}),
      {.shuffle = false});
  for (int64_t time : {250, 250, 750, 750}) {
    const HostArrays record = stream.next().read().arrays;
    ASSERT_EQ(record.at("timesteps").shape(), (Shape{DType::s64, {1}}));
    EXPECT_EQ(record.at("timesteps").view<int64_t>()[0], time);
  }
  // Each is evaluated at its own timestep, whatever the key's list of timesteps says.
  auto evaluated = [&](const std::string& name, const std::string& records, const std::vector<std::string>& extra) {
    std::vector<std::string> with = {"dataset_type=tfrecord", "train_data_dir=" + (t / "set"),
                                     "eval_every=1",          "eval_data_dir=" + (t / records),
                                     "learning_rate=0",       "max_train_steps=1"};
    with.insert(with.end(), extra.begin(), extra.end());
    const Outcome trained = run("train", name, with);
    EXPECT_EQ(trained.status, 0) << trained.err;
    return parse_json(read_file(t / (name + "/metrics.jsonl")));
  };
  ASSERT_EQ(run("prepare_tfrecords", "", {"tfrecords_dir=" + (t / "plain"), "max_train_samples=4"}).status, 0);
  const auto set_by_key = evaluated("own", "set", {"timesteps_list=[1,2,3]"}),
             listed = evaluated("listed", "plain", {"timesteps_list=[250]", "eval_max_number_of_samples_in_bucket=2"}),
             one = evaluated("one", "set", {"eval_max_number_of_samples_in_bucket=1"});
  EXPECT_NEAR(set_by_key.at("eval_loss_timestep_250"), listed.at("eval_loss_timestep_250"), 1e-6);
  EXPECT_NEAR(
      set_by_key.at("eval_loss"),
      (set_by_key.at("eval_loss_timestep_250").get<double>() + set_by_key.at("eval_loss_timestep_750").get<double>()) /
          2,
      1e-6);
  EXPECT_FALSE(set_by_key.contains("eval_loss_timestep_1"));
  EXPECT_NE(one.at("eval_loss_timestep_750"), set_by_key.at("eval_loss_timestep_750"));
  for (const auto& [word, status, says] : std::vector<std::tuple<std::string, int, std::string>>{
           {"num_eval_samples=5", 2, "expected a multiple of the 2 timesteps_list"},
           {"num_eval_samples=6", 4, "5 records can be encoded; expected num_eval_samples=6"},
           {"random_flip=true", 2, "cannot be combined with random_flip"},
           {"cache_latents_text_encoder_outputs=false", 2, "timesteps belong to encoded records"}}) {
    std::vector<std::string> bad = words;
    bad[0] = "tfrecords_dir=" + (t / "other");
    bad.push_back(word);
    o = run("prepare_tfrecords", "", bad);
    EXPECT_EQ(o.status, status);
    EXPECT_TRUE(contains(o.err, says)) << o.err;
    EXPECT_FALSE(exists(t / "other"));
  }
}

TEST_F(DataRuns, TfrecordsOfTwoTextEncodersTrainAsTheFolderDoes) {
  model = certain("pipelines/sdxl");  // these files hold latents that are already sampled
  const auto folder = trained("folder", {});
  const Outcome o = run("prepare_tfrecords", "", {"tfrecords_dir=" + (t / "set")});
  ASSERT_EQ(o.status, 0) << o.err;
  expect_near(trained("records", {"dataset_type=tfrecord", "train_data_dir=" + (t / "set")}), folder, 1e-5);
}

TEST_F(DataRuns, TfrecordsOfPackedLatentsTrainAsTheFolderDoes) {
  model = certain("flux/dev", "encoder.conv_out");
  const auto folder = trained("folder", {"max_sequence_length=12"});
  const Outcome o = run("prepare_tfrecords", "", {"tfrecords_dir=" + (t / "set"), "max_sequence_length=12"});
  ASSERT_EQ(o.status, 0) << o.err;
  // In the format that MaxDiffusion's trainer expects.
  const auto source =
      open_source({.dataset_type = "tfrecord",
                   .train_data_dir = t / "set",
                   .array_columns = {"pixel_values", "input_ids", "text_embeds", "prompt_embeds", "img_ids"}});
  RecordStream stream(source, {.shuffle = false});
  const HostArrays record = stream.next().read().arrays;
  EXPECT_EQ(record.at("pixel_values").shape(), (Shape{DType::bf16, {16, 64}}));
  EXPECT_EQ(record.at("input_ids").shape(), (Shape{DType::bf16, {12, 3}}));
  EXPECT_EQ(record.at("text_embeds").shape(), (Shape{DType::f32, {12, 12}}));
  EXPECT_EQ(record.at("prompt_embeds").shape(), (Shape{DType::f32, {16}}));
  const std::vector<double> places = record.at("img_ids").to_doubles();
  ASSERT_EQ(places.size(), 48u);
  for (size_t i = 0; i < 16; ++i) {
    EXPECT_EQ(places[3 * i], 0);
    EXPECT_EQ(places[3 * i + 1], i / 4);
    EXPECT_EQ(places[3 * i + 2], i % 4);
  }
  // The files store latents rounded to bf16.
  expect_near(trained("records", {"dataset_type=tfrecord", "train_data_dir=" + (t / "set"), "max_sequence_length=12"}),
              folder, 3e-3);
}

TEST_F(DataRuns, TfrecordsOfImagesTrainAsTheFolderDoes) {
  const auto folder = trained("folder", {});
  const Outcome o =
      run("prepare_tfrecords", "",
          {"tfrecords_dir=" + (t / "set"), "no_records_per_shard=3", "cache_latents_text_encoder_outputs=false"});
  ASSERT_EQ(o.status, 0) << o.err;
  const std::string where = "train_data_dir=" + (t / "set");
  EXPECT_EQ(trained("step", {where, "cache_latents_text_encoder_outputs=false"}).size(), 3u);
  EXPECT_EQ(trained("records", {where}), folder);
}

TEST_F(DataRuns, TarFilesByPatternAreWrittenMirroredToo) {
  const std::string files = MD_SOURCE_DIR "/tests/golden/data/files/";
  const Outcome o = run("prepare_tfrecords", "",
                        {"tfrecords_dir=" + (t / "set"), "data_files_pattern=" + files + "shard-*.tar",
                         "dataset_type=tf", "extracted_files_dir=/nowhere", "random_flip=true"});
  ASSERT_EQ(o.status, 0) << o.err;
  EXPECT_TRUE(contains(o.out, "14 records")) << o.out;
  EXPECT_TRUE(contains(o.err, "extracted_files_dir is ignored")) << o.err;
  EXPECT_FALSE(exists("/nowhere"));
}

TEST_F(DataRuns, ContinueWithTheDataThatIsThereAndSayWhatChanged) {
  const std::string files = MD_SOURCE_DIR "/tests/golden/data/files/",
                    uncached = "cache_latents_text_encoder_outputs=false", changed = "the data has changed since ";
  const auto put = [&](const std::string& file, const std::string& from) {
    make_folders(fs::path(t / file).parent_path());
    fs::copy_file(files + from, t / file, fs::copy_options::overwrite_existing);
  };
  const auto copied = [&](const std::string& name) {
    fs::copy(t / "pictures", t / name);
    return "train_data_dir=" + (t / name);
  };
  const auto remove = [&](const std::string& folder, const std::vector<std::string>& names) {
    for (const std::string& name : names)
      for (const char* ending : {".png", ".txt"}) fs::remove(t / (folder + "/" + name + ending));
  };
  for (const auto& [name, from] : {std::pair{"tar/0.tar", "shard-000000.tar"},
                                   {"tfrecord/0.tfrecord", "pictures.tfrecord"},
                                   {"tables/0.parquet", "plain.parquet"},
                                   {"tables/1.parquet", "plain.parquet"}})
    put(name, from);
  const std::string columns[] = {"image_column=picture", "caption_column=captions"};
  const std::string dream[] = {"instance_data_dir=" + (t / "subject"), "class_data_dir=" + (t / "class"),
                               "instance_prompt=a sks heart", "class_prompt=a heart", "num_class_images=1"};
  struct Case {
    std::string name;
    std::vector<std::string> keys;
    std::function<void()> change;
    std::string log;
  };
  const std::string next = "the beginning of epoch 1", same = "position 4 of epoch 0";
  std::vector<Case> cases = {{"removed",
                              {copied("removed_data")},
                              [&] {
                                remove("removed_data", {"3", "4"});
                              },
                              "it had 5 samples and has 3; training continues at " + next},
                             {"removed_uncached",
                              {copied("uncached_data"), uncached},
                              [&] {
                                remove("uncached_data", {"0", "2"});
                              },
                              "it had 5 samples and has 3; training continues at " + next},
                             {"added",
                              {copied("added_data")},
                              [&] { fs::copy_file(t / "pictures/0.png", t / "added_data/5.png"); },
                              "it had 5 samples and has 6; training continues at " + same},
                             {"renamed",
                              {copied("renamed_data")},
                              [&] { fs::rename(t / "renamed_data/0.png", t / "renamed_data/9.png"); },
                              "its 5 samples have other names; training continues at " + same},
                             {"captioned",
                              {copied("captioned_data")},
                              [&] { write_file_atomic(t / "captioned_data/1.txt", "apple 1"); },
                              "its 5 samples have other captions; training continues at " + same},
                             {"tar",
                              {"train_data_dir=" + (t / "tar"), uncached},
                              [&] { fs::rename(t / "tar/0.tar", t / "tar/1.tar"); },
                              "the files of its samples have other names or sizes; training continues at " + next},
                             {"tfrecord",
                              {"train_data_dir=" + (t / "tfrecord"), uncached},
                              [&] { fs::rename(t / "tfrecord/0.tfrecord", t / "tfrecord/1.tfrecord"); },
                              "the files of its samples have other names or sizes; training continues at " + next},
                             {"tables",
                              {"train_data_dir=" + (t / "tables"), uncached, columns[0], columns[1]},
                              [&] { fs::remove(t / "tables/1.parquet"); },
                              "it had 14 samples and has 7; training continues at " + next},
                             {"subject",
                              {dream[0], dream[1], dream[2], dream[3], dream[4]},
                              [&] {
                                remove("subject", {"3", "4"});
                              },
                              "it had 6 samples and has 4; training continues at " + next}};
  copied("subject");
  for (const Case& c : cases) {
    SCOPED_TRACE(c.name);
    const std::string name = "run_of_" + c.name;
    std::vector<std::string> keys = c.keys;
    keys.insert(keys.end(), {"per_device_batch_size=1", "max_train_steps=4"});
    Outcome o = run("train", name, keys);
    ASSERT_EQ(o.status, 0) << o.err;
    keys.back() = "max_train_steps=6";
    o = run("check", name, keys);
    EXPECT_EQ(o.status, 0) << o.err;
    EXPECT_FALSE(contains(o.err, changed)) << o.err;
    c.change();
    o = run("check", name, keys);
    EXPECT_EQ(o.status, 0) << o.err;
    const std::string what = changed + "checkpoint " + t.path() + "/" + name + "/checkpoints/4: ";
    const std::string text = c.log.substr(0, c.log.find(';'));
    EXPECT_TRUE(contains(o.err, what + text + "; it would continue with the data that is there")) << o.err;
    o = run("train", name, keys);
    EXPECT_EQ(o.status, 0) << o.err;
    EXPECT_TRUE(contains(o.err, what + c.log)) << o.err;
    EXPECT_TRUE(exists(t / (name + "/checkpoints/6")));
    keys.back() = "max_train_steps=7";  // the checkpoint was saved with the data that is there now
    o = run("train", name, keys);
    EXPECT_EQ(o.status, 0) << o.err;
    EXPECT_FALSE(contains(o.err, changed)) << o.err;
  }
}

TEST_F(DataRuns, EncodeOnlyTheImagesThatTheRunReads) {
  fs::copy(t / "pictures", t / "damaged_data");
  for (const int i : {1, 4}) write_file_atomic(t / fmt::format("damaged_data/{}.png", i), "no image");
  for (const char* folder : {"repeated_data/2_one", "repeated_data/3_two"}) make_folders(t / folder);
  for (int i = 0; i < kImages; ++i)
    for (const char* ending : {".png", ".txt"})
      fs::copy(t / fmt::format("pictures/{}{}", i, ending),
               t / fmt::format("repeated_data/{}/{}{}", i < 2 ? "2_one" : "3_two", i, ending));
  struct Case {
    std::string name;
    std::vector<std::string> keys;
    std::string log;
  };
  const std::string of_five = "of 5 images the run reads 2; 0 of 2 images and 0 of 2 captions";
  const std::vector<Case> cases = {
      {"plain", {}, of_five},
      {"in_buckets", {"enable_bucket=true", "bucket_reso_steps=8", "min_bucket_reso=8", "max_bucket_reso=32"}, of_five},
      {"damaged", {"train_data_dir=" + (t / "damaged_data")}, of_five},
      {"repeated", {"train_data_dir=" + (t / "repeated_data")}, of_five},
      {"synthetic", {"train_data_dir=", "dataset_type=synthetic"}, "of 1000 images the run reads 2; 0 of 2 images"},
      {"subject",
       {"instance_data_dir=" + (t / "pictures"), "class_data_dir=" + (t / "class"), "instance_prompt=a sks heart",
        "class_prompt=a heart", "num_class_images=1"},
       "of 5 images the run reads 2; 0 of 2 images"}};
  for (const Case& c : cases) {
    SCOPED_TRACE(c.name);
    std::vector<std::string> keys = c.keys;
    keys.insert(keys.end(), {"enable_data_shuffling=true", "per_device_batch_size=1", "max_train_steps=2"});
    const Outcome some = run("train", c.name, keys);
    ASSERT_EQ(some.status, 0) << some.err;
    EXPECT_TRUE(contains(some.err, c.log)) << some.err;
    keys.back() = "max_train_steps=4";
    const Outcome rest = run("train", c.name, keys), whole = run("train", "whole_" + c.name, keys);
    ASSERT_EQ(rest.status, 0) << rest.err;
    ASSERT_EQ(whole.status, 0) << whole.err;
    EXPECT_FALSE(contains(rest.err, "the data has changed")) << rest.err;
    EXPECT_EQ(losses(c.name), losses("whole_" + c.name));
    EXPECT_EQ(losses(c.name).size(), 4u);
  }
}

TEST_F(DataRuns, EncodeOnlyWhatChangedAndRemoveWhatIsNotUsed) {
  const std::string folder = t / "pictures", tar = t / "set.tar", unused = " cached items are not used by this dataset";
  fs::copy(folder, t / "whole");
  for (const std::string& where : {folder, tar}) {
    SCOPED_TRACE(where);
    fs::remove_all(folder);
    fs::copy(t / "whole", folder);
    const std::string name = where == tar ? "of_tar" : "of_folder";
    const auto train = [&] {
      if (where == tar) {
        EXPECT_EQ(shell("cd " + folder + " && tar --mtime=2020-01-01 -cf " + tar + " $(ls)").status, 0);
        fs::last_write_time(tar, fs::file_time_type());
      }
      const Outcome o = run("train", name, {"train_data_dir=" + where, "max_train_steps=6"});
      EXPECT_EQ(o.status, 0) << o.err;
      return o.err;
    };
    std::string log = train();
    EXPECT_TRUE(contains(log, ": 0 of 5 images and 0 of 5 captions are cached already")) << log;
    EXPECT_FALSE(contains(log, unused)) << log;
    log = train();
    EXPECT_FALSE(contains(log, "caching ")) << log;
    // A caption of the same size, in a file of the same time.
    const auto time = fs::last_write_time(folder + "/3.txt");
    write_file_atomic(folder + "/3.txt", "heard 3");
    fs::last_write_time(folder + "/3.txt", time);
    log = train();
    EXPECT_TRUE(contains(log, ": 5 of 5 images and 4 of 5 captions are cached already")) << log;
    fs::copy_file(folder + "/0.png", folder + "/5.png");  // an image that is there already, with a new caption
    write_file_atomic(folder + "/5.txt", "apple");
    log = train();
    EXPECT_TRUE(contains(log, ": 6 of 6 images and 5 of 6 captions are cached already")) << log;
    for (const char* file : {"/4.png", "/4.txt"}) fs::remove(folder + file);
    log = train();
    EXPECT_FALSE(contains(log, "caching ")) << log;
    // The image 4, its caption, and the one that 3 had.
    EXPECT_TRUE(contains(log, ": 3 of 12" + unused)) << log;
    const Outcome pruned = maxdiffusion({"prune_cache", t / name});
    EXPECT_EQ(pruned.status, 0) << pruned.err;
    EXPECT_TRUE(contains(pruned.err, ": 3 of 12 cached items removed, ")) << pruned.err;
    log = train();
    EXPECT_FALSE(contains(log, "caching ")) << log;
    EXPECT_FALSE(contains(log, unused)) << log;
  }
  EXPECT_EQ(maxdiffusion({"prune_cache", folder}).status, 4);
  EXPECT_EQ(maxdiffusion({"prune_cache"}).status, 2);
}

TEST_F(DataRuns, KilledWhileWritingTfrecordsLeavesNothingToRead) {
  for (int i = kImages; i < 400; ++i)
    fs::copy_file(t / "pictures/0.png", t / ("pictures/" + std::to_string(i) + ".png"));
  const pid_t child = ::fork();
  if (child == 0) {
    if (!std::freopen("/dev/null", "w", stderr) || !std::freopen("/dev/null", "w", stdout)) ::_exit(1);
    const std::string model_key = "pretrained_model_name_or_path=" + model, data = "train_data_dir=" + (t / "pictures"),
                      out = "tfrecords_dir=" + (t / "set");
    ::execl(MD_BINARY_DIR "/maxdiffusion", "maxdiffusion", "prepare_tfrecords",
            MD_SOURCE_DIR "/tests/pipelines/generate.yml", model_key.c_str(), data.c_str(), out.c_str(),
            "resolution=16", "no_records_per_shard=8", nullptr);
    ::_exit(1);
  }
  // Stops it while it works, once two files exist.
  for (int i = 0; i < 6000 && !exists(t / ".set.unfinished/file_01-16.tfrec"); ++i)
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  ASSERT_TRUE(exists(t / ".set.unfinished/file_01-16.tfrec"));
  ::kill(child, SIGKILL);
  int status = 0;
  ::waitpid(child, &status, 0);
  ASSERT_TRUE(WIFSIGNALED(status)) << "it was done before it could be killed";
  EXPECT_FALSE(exists(t / "set"));
  Outcome o = run("train", "half", {"dataset_type=tfrecord", "train_data_dir=" + (t / "set")});
  EXPECT_EQ(o.status, 4) << o.err;
  o = run("prepare_tfrecords", "", {"tfrecords_dir=" + (t / "set"), "no_records_per_shard=500"});
  ASSERT_EQ(o.status, 0) << o.err;
  EXPECT_TRUE(contains(o.out, "400 records")) << o.out;
  EXPECT_FALSE(exists(t / ".set.unfinished"));
  EXPECT_EQ(std::distance(fs::directory_iterator(t / "set"), {}), 1);
}

}  // namespace
}  // namespace md
