// Data in buckets: every kind of data set reads the same as from disk, through a server in this process; failures are
// reported, end in time and reveal no key.
#include <gtest/gtest.h>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/base/files.h"
#include "maxdiffusion/base/temporary_folder.h"
#include "maxdiffusion/data/images/load_images.h"
#include "maxdiffusion/data/records/open_source.h"
#include "tests/remote/world.h"

namespace md {
namespace {

// The columns of the reference's caches of latents and text embeddings.
const std::vector<std::string> kSdxlColumns = {"pixel_values", "input_ids", "prompt_embeds", "text_embeds"};
const std::vector<std::string> kLaionColumns = {"moments|latents", "clip_embeddings|hidden_states"};

class Buckets : public testing::TestWithParam<const char*> {
 protected:
  std::string at(const std::string& path) { return std::string(GetParam()) + "://" + path; }
};
INSTANTIATE_TEST_SUITE_P(, Buckets, testing::Values("s3", "gs"), [](const auto& i) { return std::string(i.param); });

/// One epoch in stored order, formatted as text.
std::vector<std::string> read_all(const DataSourceConfig& config) {
  RecordStream s(open_source(config), {.shuffle = false, .window = 3});
  std::vector<std::string> out;
  for (;;) {
    auto n = s.next();
    if (n.epoch > 0) return out;
    const Record r = n.read();
    std::string line = r.fault + "|" + r.caption + "|" + content_hash(r.image.bytes) + "|" + content_hash(r.mask.bytes);
    for (const auto& [name, a] : r.arrays)
      line +=
          "|" + name + " " + to_string(a.shape()) + content_hash({reinterpret_cast<const char*>(a.data()), a.bytes()});
    out.push_back(line);
  }
}

TEST_P(Buckets, EveryKindReadsAsFromDisk) {
  for (const auto& [path, config] : std::vector<std::pair<std::string, DataSourceConfig>>{
           {"parquet", {}},
           {"plain.parquet", {.image_column = "picture", .caption_column = "captions"}},
           {"plain.arrow", {.image_column = "picture", .caption_column = "captions"}},
           {"paths.parquet", {.image_column = "file"}},
           {"saved", {.dataset_type = "tf"}},
           {"pictures", {.dataset_type = "image_folder"}},
           {"pictures", {.dataset_type = "image_folder", .conditioning_data_dir = "pictures"}},
           {"pictures", {.dataset_type = "hf"}},
           {"pictures.tfrecord", {}},
           {"shard-*.tar", {}},
           {"shard-000000.tar,shard-000001.tar", {}},
           {"zstd.array_record", {.dataset_type = "grain"}},
           {"laion", {.dataset_type = "tfrecord", .array_columns = kLaionColumns}},
           {"sdxl.tfrecord", {.array_columns = kSdxlColumns}}}) {
    SCOPED_TRACE(path + " " + config.dataset_type);
    const auto placed = [&, path = path, config = config](const std::string& root) {
      DataSourceConfig c = config;
      if (!c.conditioning_data_dir.empty()) c.conditioning_data_dir = root + "/" + c.conditioning_data_dir;
      for (size_t start = 0; start <= path.size();) {
        const size_t end = std::min(path.find(',', start), path.size());
        c.train_data_dir += (start ? "," : "") + root + "/" + path.substr(start, end - start);
        start = end + 1;
      }
      return c;
    };
    const bool zipped = path == "zstd.array_record";
    EXPECT_EQ(read_all(placed(at("files/data"))), read_all(placed(zipped ? world->folder.path() : kFiles)));
  }
}

TEST_P(Buckets, ListingsHavePagesPatternsAndNoHiddenFiles) {
  for (const char* key : {"d/a.x", "d/b.x", "d/c.y", "d/s/d.x", "d/s/e.x", "d/s/.f.x", "d/.t/g.x", "d2/h.x", "d/ü i.x"})
    server().put("list", key, key);
  const auto names = [&](const std::string& path) {
    std::string all;
    for (const FoundFile& f : list_inputs(at("list/" + path))) {
      const auto file = open_input(f);
      EXPECT_EQ(file->read(0, file->size()).bytes, f.location.substr(at("list/").size()));
      EXPECT_EQ(open_input(f.location)->size(), f.size);
      all += (all.empty() ? "" : " ") + f.location.substr(at("list/").size());
    }
    return all;
  };
  EXPECT_EQ(names("d"), "d/a.x d/b.x d/c.y d/s/d.x d/s/e.x d/ü i.x");
  EXPECT_EQ(names("d/"), names("d"));
  EXPECT_EQ(names("d/*.x"), "d/a.x d/b.x d/ü i.x");
  EXPECT_EQ(names("d/**.x"), "d/a.x d/b.x d/s/d.x d/s/e.x d/ü i.x");
  EXPECT_EQ(names("d/[ab].x"), "d/a.x d/b.x");
  EXPECT_EQ(names("d/a.x"), "d/a.x");
  EXPECT_EQ(list_inputs(at("list")).size(), 7u);
  expect_says(failure_of([&] { list_inputs(at("list/d/*.z")); }), {"list/d/*.z", "no file matches"});
  expect_says(failure_of([&] { list_inputs(at("li*t/d")); }), {"the name of a bucket has no wildcards"});
}

TEST_P(Buckets, FingerprintsFollowTimesAndSizes) {
  const std::string tar = read_file(kFiles + "/shard-000000.tar");
  const auto print = [&] { return open_source({.train_data_dir = at("print/a.tar")})->fingerprint(); };
  server().put("print", "a.tar", tar);
  const std::string first = print();
  EXPECT_EQ(print(), first);
  server().put("print", "a.tar", tar, 1'700'000'001);
  EXPECT_NE(print(), first);
  server().put("print", "a.tar", tar + std::string(512, '\0'));
  EXPECT_NE(print(), first);
}

TEST_P(Buckets, ImageFoldersAreListedOnceAndFilesReadOnce) {
  server().requests();
  const DataSourceConfig config{.dataset_type = "image_folder", .train_data_dir = at("files/data/pictures")};
  const auto records = read_all(config);
  int64_t objects = 0, whole = 0;
  for (const std::string& r : server().requests()) {
    whole += r.ends_with(".png") || r.ends_with(".jpg") || r.ends_with(".jpeg") || r.ends_with(".webp");
    objects += r.starts_with("HEAD");
  }
  EXPECT_EQ(whole, static_cast<int64_t>(records.size()));
  EXPECT_LE(objects, 2);  // requests to find out whether the location is a file
}

TEST_P(Buckets, WhatIsMissingOrForbiddenIsNamed) {
  server().put("files", "empty/", "");
  server().put("locked", "a.tar", "x");
  server().lock("locked", "");
  expect_says(failure_of([&] { open_source({.train_data_dir = at("files/data/none.tar")}); }),
              {at("files/data/none.tar"), "it has no 'data/none.tar'"});
  expect_says(failure_of([&] { open_input(at("files/data/none.tar")); }), {at("files/data/none.tar"), "none.tar'"});
  expect_says(failure_of([&] { open_source({.train_data_dir = at("nowhere")}); }),
              {at("nowhere"), "is 'nowhere' the bucket's name?"});
  for (const char* path : {"locked", "locked/a.tar", "locked/*.tar"})
    expect_says(failure_of([&] { open_source({.train_data_dir = at(path)}); }),
                {at("locked"), "try: set the credentials"});
  expect_says(failure_of([&] { list_inputs(at("/a")); }), {"no bucket"});
  expect_says(failure_of([&] {
                open_source({.dataset_type = "image_folder", .train_data_dir = at("files/data/plain.arrow")});
              }),
              {at("files/data/plain.arrow"), "not a folder"});
}

TEST_P(Buckets, AConnectionLostForAMomentIsNotNoticed) {
  const DataSourceConfig config{.train_data_dir = at("files/data/shard-000000.tar")};
  const auto expected = read_all(config);
  for (const auto fault : {BucketServer::Fault::drop, BucketServer::Fault::truncate}) {
    server().fail(fault, 1);
    EXPECT_EQ(read_all(config), expected);
  }
  server().fail(BucketServer::Fault::none, 0);
}

TEST_P(Buckets, PermanentDisconnectionIsReportedInTime) {
  // Google's library may retry for as long as the location allows.
  const DataSourceConfig config{.train_data_dir = at("files/data/shard-000000.tar") +
                                                  (GetParam() == std::string("gs") ? "?retry_limit_seconds=2" : "")};
  for (const auto fault : {BucketServer::Fault::drop, BucketServer::Fault::truncate}) {
    server().fail(fault, 1 << 20);
    const Failure f = failure_of([&] { read_all(config); });
    server().fail(BucketServer::Fault::none, 0);
    expect_says(f, {at("files/data/shard-000000.tar"), "attempts", "try: is the network up"});
    EXPECT_LT(f.seconds, 30);
  }
  EXPECT_FALSE(read_all(config).empty());
}

TEST_P(Buckets, MissingImageIsSkippedWithAWarning) {
  const std::string png = read_file(kFiles + "/pictures/" + [] {
    for (const FoundFile& f : list_inputs(kFiles + "/pictures"))
      if (f.location.ends_with(".png")) return f.location.substr(f.location.rfind('/') + 1);
    return std::string();
  }());
  server().put("holes", "d/a.png", png);
  server().put("holes", "d/b.png", "no image");
  const LoadedImages l =
      load_images(open_source({.dataset_type = "image_folder", .train_data_dir = at("holes/d")}), {.resolution = 8});
  ASSERT_EQ(l.skipped.size(), 1u);
  EXPECT_NE(l.skipped[0].find(at("holes/d/b.png")), std::string::npos) << l.skipped[0];
}

TEST(S3, WhoAsksIsTheEnvironmentOrTheLocationAndNeverShown) {
  server().put("private", "a.tar", read_file(kFiles + "/shard-000000.tar"));
  server().lock("private", "owner");
  const std::string query = "?scheme=http&endpoint_override=" + server().address();
  EXPECT_FALSE(read_all({.train_data_dir = "s3://owner:hush-location@private/a.tar" + query}).empty());
  expect_says(failure_of([&] { open_source({.train_data_dir = "s3://other:hush-location@private/a.tar" + query}); }),
              {"'s3://private/a.tar'", "AWS_ACCESS_KEY_ID"});
  expect_says(failure_of([&] { open_source({.train_data_dir = "s3://private/a.tar"}); }), {"'s3://private/a.tar'"});
  expect_says(failure_of([&] { open_source({.train_data_dir = "s3://other:hush@private/a.tar?wrong=hush"}); }),
              {"'s3://private/a.tar'"});
  const auto before = server().signers();
  EXPECT_TRUE(before.contains("reader"));
  EXPECT_TRUE(before.contains("owner"));
  EXPECT_FALSE(read_all({.train_data_dir = "s3://anonymous@files/data/shard-000000.tar"}).empty());
  EXPECT_EQ(server().signers(), before);
}

TEST(Gcs, OtherServersAreNamedBehindTheLocation) {
  const std::string query = "?scheme=http&endpoint_override=" + server().address();
  EXPECT_EQ(read_all({.train_data_dir = "gs://anonymous@files/data/shard-000000.tar" + query}),
            read_all({.train_data_dir = kFiles + "/shard-000000.tar"}));
  expect_says(failure_of([&] { open_source({.train_data_dir = "gs://files/a.tar?wrong=1"}); }), {"'gs://files/a.tar'"});
}

}  // namespace
}  // namespace md
