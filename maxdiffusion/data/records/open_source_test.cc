// Every kind of data set, written by the libraries of its format; see tools/golden/data_files.py.
#include "maxdiffusion/data/records/open_source.h"

#include <gtest/gtest.h>
#include <unistd.h>
#include <zlib.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <set>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/base/files.h"
#include "maxdiffusion/base/parse_json.h"
#include "maxdiffusion/base/temporary_folder.h"
#include "maxdiffusion/data/batches/image_batches.h"
#include "maxdiffusion/data/images/load_images.h"
#include "maxdiffusion/data/records/tfrecord_writer.h"
#include "maxdiffusion/media/decode_image.h"
#include "maxdiffusion/media/image.h"

namespace md {
namespace {

// The columns of the reference's caches of latents and text embeddings.
const std::vector<std::string> kSdxlColumns = {"pixel_values", "input_ids", "prompt_embeds", "text_embeds"};
const std::vector<std::string> kLaionColumns = {"moments|latents", "clip_embeddings|hidden_states"};

namespace fs = std::filesystem;

const std::string kFiles = MD_SOURCE_DIR "/tests/golden/data/files";
constexpr int64_t kRecords = 7;

struct Expected {
  std::string image, caption;
};
const std::vector<Expected>& expected() {
  static const std::vector<Expected> all = [] {
    std::vector<Expected> v;
    const auto file = parse_json(read_file(kFiles + "/expected.json"));
    for (const auto& row : file["records"]) {
      const std::string hex = row["picture"];
      std::string bytes;
      for (size_t i = 0; i < hex.size(); i += 2) bytes += static_cast<char>(std::stoi(hex.substr(i, 2), nullptr, 16));
      v.push_back({bytes, row["caption"]});
    }
    return v;
  }();
  return all;
}
HostArray expected_moments(int64_t i) {
  HostArray a(Shape{DType::f32, {2, 3, 8}});
  for (size_t k = 0; k < 48; ++k) a.mutable_view<float>()[k] = static_cast<float>(k) / 4 + 1000 * static_cast<float>(i);
  return a;
}
HostArray expected_clip(int64_t i) {
  HostArray a(Shape{DType::f32, {5, 4}});
  for (size_t k = 0; k < 20; ++k) a.mutable_view<float>()[k] = static_cast<float>(k) / 8 - 1000 * static_cast<float>(i);
  return a;
}
void expect_same(const HostArray& found, const HostArray& expected) {
  ASSERT_EQ(found.shape(), expected.shape());
  EXPECT_EQ(std::memcmp(found.data(), expected.data(), expected.bytes()), 0);
}

const TemporaryFolder& scratch() {
  static const TemporaryFolder folder;
  return folder;
}
std::string put(const std::string& name, const std::string& bytes) {
  std::string path = scratch() / name;
  fs::create_directories(fs::path(path).parent_path());
  std::ofstream(path, std::ios::binary) << bytes;
  return path;
}
/// An ArrayRecord file, decompressed.
std::string array_record(const std::string& name) {
  gzFile zipped = gzopen((kFiles + "/" + name + ".array_record.gz").c_str(), "rb");
  std::string bytes(1 << 20, '\0');
  const int n = gzread(zipped, bytes.data(), static_cast<unsigned>(bytes.size()));
  gzclose(zipped);
  bytes.resize(static_cast<size_t>(std::max(n, 0)));
  return bytes;
}

std::string error_of(const std::function<void()>& f, Code code = Code::io) {
  try {
    f();
  } catch (const Error& e) {
    EXPECT_EQ(e.code(), code) << e.what();
    return e.what();
  }
  return "no error";
}
#define EXPECT_ERROR(statement, text)                            \
  do {                                                           \
    const std::string message = error_of([&] { statement; });    \
    EXPECT_NE(message.find(text), std::string::npos) << message; \
  } while (false)

/// All records of one epoch, in stored order.
std::vector<Record> all_of(const DataSourceConfig& config) {
  RecordStream s(open_source(config), {.shuffle = false, .window = 3});
  std::vector<Record> out;
  for (;;) {
    auto n = s.next();
    if (n.epoch > 0) return out;
    out.push_back(n.read());
  }
}
void expect_images(const DataSourceConfig& config, size_t count = kRecords) {
  SCOPED_TRACE(config.train_data_dir + config.hf_train_files + config.grain_train_files + config.dataset_name);
  const auto records = all_of(config);
  ASSERT_EQ(records.size(), count);
  for (size_t i = 0; i < count; ++i) {
    EXPECT_EQ(records[i].fault, "");
    EXPECT_EQ(records[i].caption, expected()[i].caption);
    EXPECT_EQ(records[i].image.bytes, expected()[i].image);
  }
  const LoadedImages l = load_images(open_source(config), {.resolution = 8});
  EXPECT_EQ(l.pixels.dims(), (Dims{static_cast<int64_t>(count), 8, 8, 3}));
  EXPECT_EQ(l.captions.back(), expected()[count - 1].caption);
}
void expect_arrays(DataSourceConfig config) {
  SCOPED_TRACE(config.train_data_dir + config.hf_train_files + config.grain_train_files);
  config.array_columns = kLaionColumns;
  const auto records = all_of(config);
  ASSERT_EQ(records.size(), static_cast<size_t>(kRecords));
  for (int64_t i = 0; i < kRecords; ++i) {
    const auto& arrays = records[static_cast<size_t>(i)].arrays;
    ASSERT_EQ(arrays.size(), 2u);
    expect_same(arrays.at("moments"), expected_moments(i));
    expect_same(arrays.at("clip_embeddings"), expected_clip(i));
  }
}
/// Truncates a file at several places and flips bytes: each result must be an error or other data, never a crash.
void expect_no_crash(const std::string& bytes, const std::string& name, DataSourceConfig config, bool checked) {
  const auto read = [&](const std::string& damaged) {
    config.train_data_dir = put("damaged/" + name, damaged);
    try {
      all_of(config);
      return true;
    } catch (const Error& e) {
      EXPECT_TRUE(e.code() == Code::io) << e.what();
      return false;
    }
  };
  for (size_t cut : {size_t{0}, size_t{3}, bytes.size() / 3, bytes.size() / 2})
    EXPECT_FALSE(read(bytes.substr(0, cut)) && checked) << name << " cut to " << cut;
  read(bytes.substr(0, bytes.size() - 1));  // the reader may ignore bytes after the records
  for (size_t i = 0; i < bytes.size(); i += std::max<size_t>(bytes.size() / 97, 1)) {
    std::string damaged = bytes;
    damaged[i] = static_cast<char>(damaged[i] ^ 0x5a);
    read(damaged);
  }
}

// S2-48, S4-50
TEST(Source, ParquetWithImageStructsAndSplits) {
  expect_images({.dataset_type = "hf", .train_data_dir = kFiles + "/parquet"});
  expect_images({.dataset_type = "tf", .dataset_name = kFiles + "/parquet"});
  expect_images({.dataset_type = "hf", .hf_data_dir = kFiles + "/parquet"});
  expect_images({.dataset_type = "hf", .dataset_name = kFiles + "/parquet", .train_split = "test"}, 1);
  expect_images({.dataset_type = "hf", .hf_train_files = kFiles + "/parquet/data/train-*.parquet"});
  expect_images({.dataset_type = "hf", .hf_train_files = kFiles + "/**/train-*.parquet"});
  expect_images({.dataset_type = "hf",
                 .hf_train_files = kFiles + "/parquet/data/train-00000-of-00002.parquet, " + kFiles +
                                   "/parquet/data/train-00001-of-00002.parquet"});
  expect_images({.hf_train_files = kFiles + "/parquet/data/train*", .max_train_samples = 6}, 6);
  EXPECT_EQ(open_source({.dataset_type = "hf", .train_data_dir = kFiles + "/parquet"})->shards(), 4);  // row groups
  EXPECT_ERROR(open_source({.dataset_type = "hf", .train_data_dir = kFiles + "/parquet", .train_split = "validation"}),
               "no file of split 'validation'");
}

TEST(Source, TablesWithPlainBytesOtherNamesAndFilesNextToThem) {
  for (const char* file : {"/plain.parquet", "/plain.arrow"}) {
    expect_images({.dataset_type = "hf",
                   .train_data_dir = kFiles + file,
                   .image_column = "picture",
                   .caption_column = "captions"});
  }
  expect_images({.dataset_type = "hf", .train_data_dir = kFiles + "/paths.parquet", .image_column = "file"});
}

// S4-50
TEST(Source, SavedToDisk) {
  const DataSourceConfig c{.dataset_type = "hf", .train_data_dir = kFiles + "/saved"};
  expect_images(c);
  EXPECT_EQ(open_source(c)->shards(), 0);  // random access: Arrow files are mapped
  EXPECT_EQ(open_source(c)->read(5).caption, expected()[5].caption);
  expect_images({.dataset_type = "hf", .train_data_dir = kFiles + "/saved", .train_split = "test"}, 1);
  expect_images({.dataset_type = "hf", .train_data_dir = kFiles + "/saved/train"});
  const std::string none =
      error_of([] { open_source({.dataset_type = "image_folder", .train_data_dir = kFiles, .train_split = "test"}); },
               Code::invalid_config);
  EXPECT_NE(none.find("image_folder has no splits"), std::string::npos) << none;
  EXPECT_ERROR(open_source({.dataset_type = "hf", .train_data_dir = kFiles + "/saved", .train_split = "dev"}),
               "no split 'dev'; it has: train, test");
}

TEST(Source, ImageFolderOfSplits) {
  const TemporaryFolder t;
  fs::copy(kFiles + "/pictures", t / "train", fs::copy_options::recursive);
  make_folders(t / "test");
  write_file_atomic(t / "test/other.png", read_file(all_of({.train_data_dir = kFiles + "/pictures"})[0].name));
  expect_images({.dataset_type = "hf", .train_data_dir = t.path()});
  EXPECT_EQ(open_source({.dataset_type = "hf", .train_data_dir = t.path(), .train_split = "test"})->size(), 1);
  EXPECT_ERROR(open_source({.dataset_type = "hf", .train_data_dir = t.path(), .train_split = "dev"}),
               "no folder of split 'dev'");
}

TEST(Source, ImageFolderWithCsv) {
  expect_images({.dataset_type = "image_folder", .train_data_dir = kFiles + "/pictures"});
  expect_images({.dataset_type = "hf", .train_data_dir = kFiles + "/pictures"});
  expect_images({.train_data_dir = kFiles + "/pictures", .image_column = "file_name", .max_train_samples = 2}, 2);
}

TEST(References, AreReadFromEveryKindOfData) {
  const DataSourceConfig kinds[] = {
      {.dataset_type = "hf", .train_data_dir = kFiles + "/parquet"},
      {.dataset_type = "hf", .train_data_dir = kFiles + "/saved"},
      {.dataset_type = "hf",
       .train_data_dir = kFiles + "/plain.arrow",
       .image_column = "picture",
       .caption_column = "captions"},
      {.dataset_type = "hf", .train_data_dir = kFiles + "/paths.parquet", .image_column = "file"},
      {.dataset_type = "tfrecord", .train_data_dir = kFiles + "/pictures.tfrecord"},
  };
  const std::vector<Record> made =
      all_of({.dataset_type = "synthetic", .cond_image_column = "a,b", .synthetic_num_samples = 3, .resolution = 8});
  ASSERT_EQ(made.size(), 3u);
  std::set<std::string_view> all;
  for (const Record& r : made)
    for (const Blob& reference : r.references) all.insert(reference.bytes);
  EXPECT_EQ(all.size(), 6u);
  for (DataSourceConfig c : kinds) {
    SCOPED_TRACE(c.train_data_dir);
    c.cond_image_column = c.image_column + " ," + c.image_column;
    const std::vector<Record> records = all_of(c);
    ASSERT_EQ(records.size(), static_cast<size_t>(kRecords));
    for (const Record& r : records) {
      EXPECT_EQ(r.fault, "");
      ASSERT_EQ(r.references.size(), 2u);
      for (const Blob& reference : r.references) EXPECT_EQ(reference.bytes, r.image.bytes);
    }
    c.cond_image_column = "source";
    EXPECT_ERROR(all_of(c), "no column 'source'");
    EXPECT_NE(open_source({.train_data_dir = kFiles + "/pictures"})->fingerprint(),
              open_source({.train_data_dir = kFiles + "/pictures", .cond_image_column = "file_name"})->fingerprint());
  }
  // Members of a tar are chosen by extension: here a text instead of images.
  const DataSourceConfig tar{.train_data_dir = kFiles + "/shard-000000.tar", .cond_image_column = "cls"};
  for (const Record& r : all_of(tar)) {
    ASSERT_EQ(r.references.size(), 1u);
    EXPECT_FALSE(r.references[0].bytes.empty());
    EXPECT_NE(r.references[0].bytes, r.image.bytes);
  }
  EXPECT_NE(all_of({.train_data_dir = kFiles + "/shard-000000.tar", .cond_image_column = "source"})[0].fault.find(
                "no 'source'"),
            std::string::npos);
}

TEST(References, OfAFolderAreNoImagesOfTheirOwnAndAreNamedByMetadata) {
  const auto with = [](const std::string& metadata) {
    fs::remove_all(scratch() / "edits");
    for (int i = 0; i < 4; ++i) put(fmt::format("edits/{}.png", i), expected()[static_cast<size_t>(i)].image);
    put("edits/metadata.jsonl", metadata);
    return DataSourceConfig{.train_data_dir = scratch() / "edits", .cond_image_column = "source"};
  };
  const std::vector<Record> pairs = all_of(with(R"({"file_name": "0.png", "source": "1.png", "text": "red"}
{"file_name": "2.png", "source": "0.png", "text": "blue"}
{"file_name": "3.png", "source": "1.png", "text": ""})"));
  ASSERT_EQ(pairs.size(), 3u);  // 1.png is a source only, 0.png both
  EXPECT_EQ(pairs[0].references.at(0).bytes, expected()[1].image);
  EXPECT_EQ(pairs[1].references.at(0).bytes, expected()[0].image);
  // A list, and another column between its images.
  const std::string line = R"({"file_name": "0.png", "source": ["2.png", "3.png"], "pose": "1.png", "text": ""})";
  DataSourceConfig lists = with(line);
  lists.cond_image_column = "source, pose, source";
  const std::vector<Record> several = all_of(lists);
  ASSERT_EQ(several.size(), 1u);
  ASSERT_EQ(several[0].references.size(), 3u);
  for (const auto& [i, image] : {std::pair{0, 2}, {1, 1}, {2, 3}})
    EXPECT_EQ(several[0].references[static_cast<size_t>(i)].bytes, expected()[static_cast<size_t>(image)].image) << i;
  EXPECT_ERROR(all_of(with(line)), "metadata.jsonl:1: 'source' lists 2 images; cond_image_column names it 1 times");
  EXPECT_ERROR(all_of(with(R"({"file_name": "0.png", "text": "red"})")), "metadata.jsonl:1: no column 'source'");
  EXPECT_ERROR(all_of(with(R"({"file_name": "0.png", "source": "9.png", "text": "red"})")), "which does not exist");
  EXPECT_ERROR(all_of(with(R"({"file_name": "0.png", "source": 1, "text": "red"})")), "'source' must be a string");
  EXPECT_ERROR(all_of(with(R"({"file_name": "0.png", "source": "1.png", "text": "red"})")),
               "cond_image_column: '" + scratch() / "edits/2.png" + "' has no reference image");
}

// A reference of the image's size is resized and cropped like the image; another is fitted to its size, cropped at the
// centre.
TEST(References, AreMadeToFitTheImage) {
  const auto png = [](int64_t height, int64_t width) {
    HostArray rgb(Shape{DType::u8, {height, width, 3}});
    auto v = rgb.mutable_view<uint8_t>();
    for (size_t i = 0; i < v.size(); ++i) v[i] = static_cast<uint8_t>(i / 3 % static_cast<size_t>(width) * 4);
    return Blob::of(encode_png(rgb));
  };
  Record r{.name = "x", .image = png(24, 40), .references = {png(24, 40), png(60, 50)}};
  const HostArrays fit =
      prepare_image(r, {.resolution = 16, .center_crop = true, .references = 2}, {.flip = true}).arrays;
  expect_same(fit.at("reference_image_0"), fit.at("pixels"));
  const HostArray& other = fit.at("reference_image_1");
  EXPECT_EQ(other.dims(), (Dims{16, 16, 3}));
  const auto v = other.view<uint8_t>();
  EXPECT_GT(v[0], v[45]);                // mirrored
  EXPECT_NEAR(v[0] + v[45], 4 * 49, 4);  // the width is not cropped, only rows are
  r.references.pop_back();
  EXPECT_ERROR(prepare_image(r, {.resolution = 16, .references = 2}, {}), "x: 1 reference images; expected 2");
}

TEST(Source, CsvCellsMayBeQuotedAndLinesAreCounted) {
  const auto with = [](const std::string& csv) {
    const std::string folder = scratch() / "csv";
    for (const char* name : {"a, b.png", "c.png"}) put(std::string("csv/") + name, expected()[0].image);
    put("csv/metadata.csv", csv);
    std::vector<std::string> captions;
    for (const Record& r : all_of({.dataset_type = "image_folder", .train_data_dir = folder}))
      captions.push_back(r.caption);
    return captions;
  };
  EXPECT_EQ(with("\xef\xbb\xbf"
                 "text,file_name\n\"two\nlines, \"\"said\"\"\",\"a, b.png\"\r\n\nplain,c.png"),
            (std::vector<std::string>{"two\nlines, \"said\"", "plain"}));
  EXPECT_ERROR(with("text,file_name\nx,c.png,more\n"), "metadata.csv:2: 3 cells; the first line has 2");
  EXPECT_ERROR(with("text,file_name\n\"x\ny\",c.png\n\"z,c.png\n"), "metadata.csv:4: a quoted cell does not end");
  EXPECT_ERROR(with("caption,file_name\nx,c.png\n"), "no column 'text'; the line has: caption, file_name");
}

TEST(Source, TfrecordImages) {
  expect_images({.dataset_type = "tfrecord", .train_data_dir = kFiles + "/pictures.tfrecord"});
}

TEST(Source, WebDataset) {
  expect_images({.dataset_type = "webdataset", .train_data_dir = kFiles + "/shard-*.tar"});
  expect_images({.train_data_dir = kFiles + "/shard-000000.tar," + kFiles + "/shard-000001.tar"});
}

// A tar file of these members. Format: POSIX ustar.
std::string tar_of(const std::vector<std::pair<std::string, std::string>>& members) {
  std::string out;
  for (const auto& [name, bytes] : members) {
    std::string header = name;
    header.resize(512, '\0');
    header.replace(100, 7, "0000644").replace(124, 11, fmt::format("{:011o}", bytes.size()));
    header[156] = '0';
    header.replace(257, 5, "ustar").replace(263, 2, "00").replace(148, 8, 8, ' ');
    unsigned sum = 0;
    for (const char c : header) sum += static_cast<unsigned char>(c);
    header.replace(148, 6, fmt::format("{:06o}", sum)).replace(154, 1, 1, '\0');
    out += header + bytes + std::string((512 - bytes.size() % 512) % 512, '\0');
  }
  return out + std::string(1024, '\0');
}

TEST(Source, TarsHoldImagesOfAllKindsAndCompressedOnesAreNamed) {
  const std::string folder = testing::TempDir() + "tars_of_kinds";
  fs::remove_all(folder);
  fs::create_directories(folder);
  const std::string png = "bytes";  // not decoded here
  write_file_atomic(folder + "/0.tar", tar_of({{"a.jfif", png}, {"a.txt", "first"}, {"b.bmp", png}, {"b.txt", "b"}}));
  const std::vector<Record> all = all_of({.train_data_dir = folder});
  ASSERT_EQ(all.size(), 2u);
  for (const Record& r : all) EXPECT_EQ(r.image.bytes, png) << r.fault;
  write_file_atomic(folder + "/1.tar.gz", "x");
  const std::string refusal = "1.tar.gz': a compressed tar file; expected .tar";
  EXPECT_ERROR(all_of({.train_data_dir = folder}), refusal);
  EXPECT_ERROR(all_of({.train_data_dir = folder + "/1.tar.gz"}), refusal);
}

/// What is logged while all records are read; `captions` receives theirs.
std::string log_of(const DataSourceConfig& config, std::vector<std::string>& captions) {
  testing::internal::CaptureStderr();
  captions.clear();
  for (const Record& r : all_of(config)) captions.push_back(r.caption);
  return testing::internal::GetCapturedStderr();
}

TEST(MissingCaptions, OfTarsAreCounted) {
  const std::string a = expected()[0].image, b = expected()[1].image;
  const std::string apple_double(64, '\7');
  std::vector<std::string> captions;
  std::string log = log_of({.train_data_dir = put("bare.tar", tar_of({{"0.png", a}, {"1.png", b}}))}, captions);
  EXPECT_EQ(captions, (std::vector<std::string>{"", ""}));
  EXPECT_NE(log.find("bare.tar 0: no caption"), std::string::npos) << log;
  EXPECT_NE(log.find("2 of 2 records have no caption: they train with an empty caption"), std::string::npos) << log;
  // Members of a sample that are not next to each other.
  const std::string parted = put("parted.tar", tar_of({{"0.png", a}, {"1.png", b}, {"0.txt", "x"}, {"1.txt", "y"}}));
  log = log_of({.train_data_dir = parted}, captions);
  EXPECT_NE(log.find("2 of 4 records have no caption"), std::string::npos) << log;
  EXPECT_NE(all_of({.train_data_dir = parted})[2].fault.find("expected the members of a sample next to each other"),
            std::string::npos);
  // Of some of the records only.
  log = log_of({.train_data_dir = put("some.tar", tar_of({{"0.png", a}, {"0.txt", "x"}, {"1.png", b}}))}, captions);
  EXPECT_EQ(captions, (std::vector<std::string>{"x", ""}));
  EXPECT_NE(log.find("1 of 2 records has no caption: it trains with an empty caption"), std::string::npos) << log;
  // macOS' members are not read; captions have no byte order mark.
  log = log_of({.train_data_dir = put("macos.tar", tar_of({{"./._0.png", apple_double},
                                                           {"./0.png", a},
                                                           {"./._0.txt", apple_double},
                                                           {"./0.txt", "\xef\xbb\xbfone"},
                                                           {"__MACOSX/._1.png", apple_double},
                                                           {"./1.png", b},
                                                           {"./1.txt", std::string("\xff\xfet\0w\0o\0", 8)}}))},
               captions);
  EXPECT_EQ(captions, (std::vector<std::string>{"one", "two"}));
  EXPECT_EQ(log.find("no caption"), std::string::npos) << log;
  EXPECT_ERROR(all_of({.train_data_dir = put("latin.tar", tar_of({{"0.png", a}, {"0.txt", "one\n\xe9"}}))}),
               "latin.tar 0.txt:2: byte E9, which is not UTF-8");
}

TEST(MissingCaptions, OfTfrecordsAndTablesAreCounted) {
  const auto write = [](const std::string& name, const std::vector<std::string>& texts) {
    fs::remove_all(scratch() / name);
    TfrecordShards out(scratch() / name, 10);
    for (const std::string& text : texts) out.add({{"image", expected()[0].image}, {"text", text}});
    out.close();
    return DataSourceConfig{.dataset_type = "tfrecord", .train_data_dir = scratch() / name};
  };
  std::vector<std::string> captions;
  std::string log = log_of(write("bare", {"", "\xef\xbb\xbfone", " ", "two"}), captions);
  EXPECT_EQ(captions, (std::vector<std::string>{"", "one", " ", "two"}));
  EXPECT_NE(log.find("2 of 4 records have no caption"), std::string::npos) << log;
  EXPECT_EQ(log_of(write("all", {"one", "two"}), captions).find("no caption"), std::string::npos);
  EXPECT_ERROR(all_of(write("latin", {"\xe9"})), "'text':1: byte E9, which is not UTF-8");
  for (const auto& [file, type] : {std::pair{"/parquet", "hf"}, {"/saved", "hf"}, {"/pictures.tfrecord", "tfrecord"}}) {
    SCOPED_TRACE(file);
    log = log_of({.dataset_type = type, .train_data_dir = kFiles + file}, captions);
    const auto bare = std::ranges::count(captions, "");
    EXPECT_EQ(log.find("no caption") != log.npos, bare > 0) << log;
    if (bare > 0) {
      EXPECT_NE(log.find(fmt::format("{} of {} record", bare, captions.size())), log.npos) << log;
    }
  }
}

TEST(Source, ArrayRecords) {
  for (const char* name : {"plain", "zstd", "brotli", "snappy"}) {
    const std::string file = put(std::string(name) + ".array_record", array_record(name));
    expect_images({.dataset_type = "grain", .grain_train_files = file});
    expect_arrays({.dataset_type = "grain", .grain_train_files = file});
    EXPECT_EQ(open_source({.grain_train_files = file})->size(), kRecords);
  }
  const std::string two = scratch() / "zstd.array_record," + scratch() / "brotli.array_record";
  EXPECT_EQ(open_source({.dataset_type = "grain", .grain_train_files = two})->read(9).caption, expected()[2].caption);
  EXPECT_ERROR(open_source({.grain_train_files = put("t.array_record", array_record("transposed"))})->read(0),
               "expected transpose:false");
}

TEST(Source, CachedArraysOfEveryKind) {
  expect_arrays({.dataset_type = "tfrecord", .train_data_dir = kFiles + "/laion"});
  expect_arrays({.dataset_type = "hf", .train_data_dir = kFiles + "/saved_arrays"});
  expect_arrays({.dataset_type = "hf", .train_data_dir = kFiles + "/arrays.parquet"});
  DataSourceConfig c{.dataset_type = "hf", .train_data_dir = kFiles + "/arrays.parquet", .array_columns = {"number"}};
  EXPECT_EQ(all_of(c)[3].arrays.at("number").shape(), (Shape{DType::s32, {}}));
  c = {.dataset_type = "tfrecord", .train_data_dir = kFiles + "/sdxl.tfrecord", .array_columns = kSdxlColumns};
  auto d = array_batches(open_source(c), {.stream = {.shuffle = false}, .batch = kRecords});
  const Batch b = d->next();
  EXPECT_EQ(b.size(), 4u);
  EXPECT_EQ(b.at("pixel_values").shape(), (Shape{DType::f32, {7, 2, 3, 8}}));
  EXPECT_EQ(b.at("prompt_embeds").shape(), (Shape{DType::f32, {7, 5, 4}}));
  EXPECT_EQ(b.at("text_embeds").shape(), (Shape{DType::f32, {7, 4}}));
  EXPECT_EQ(b.at("input_ids").shape(), (Shape{DType::s32, {7, 2, 3}}));
  for (size_t i = 0; i < 7; ++i) EXPECT_EQ(b.at("input_ids").view<int32_t>()[i * 6 + 5], static_cast<int32_t>(i));
}

TEST(Source, SyntheticImagesDifferAndStayTheSame) {
  const DataSourceConfig c{.dataset_type = "synthetic", .synthetic_num_samples = 5, .resolution = 16};
  DataSourceConfig of_clips = c;
  of_clips.synthetic_frames = 4;
  const Record clip = open_source(of_clips)->read(2);
  ASSERT_EQ(clip.frames.size(), 4U);
  EXPECT_FALSE(clip.pixels);
  const auto frame = [&](size_t i) {
    const auto bytes = clip.frames[i].bytes;
    return decode_image_bytes(bytes.data(), bytes.size(), "frame");
  };
  expect_same(frame(0), open_source(c)->read(2).pixels);
  EXPECT_NE(std::memcmp(frame(0).data(), frame(1).data(), 768), 0) << "it does not move";
  const auto a = load_images(open_source(c), {.resolution = 16}), b = load_images(open_source(c), {.resolution = 16});
  EXPECT_EQ(a.pixels.dims(), (Dims{5, 16, 16, 3}));
  EXPECT_EQ(open_source(c)->fingerprint(), open_source(c)->fingerprint());
  expect_same(a.pixels, b.pixels);
  EXPECT_EQ(std::set<std::string>(a.captions.begin(), a.captions.end()).size(), 5u);
  EXPECT_NE(std::memcmp(a.pixels.data(), a.pixels.data() + 768, 768), 0);
}

TEST(Source, SyntheticArraysAreNormalAndStayTheSame) {
  const DataSourceConfig c{.dataset_type = "synthetic",
                           .synthetic_num_samples = 3,
                           .synthetic_arrays = {{"latents", {DType::f32, {5, 40, 25}}}, {"label", {DType::s32, {2}}}},
                           .synthetic_seed = 7};
  DataSourceConfig other = c;
  other.synthetic_seed = 8;
  const auto a = open_source(c), b = open_source(c), d = open_source(other);
  ASSERT_EQ(a->size(), 3);
  const HostArray x = a->read(1).arrays.at("latents");
  EXPECT_EQ(x.shape(), (Shape{DType::f32, {5, 40, 25}}));
  expect_same(x, b->read(1).arrays.at("latents"));
  EXPECT_NE(std::memcmp(x.data(), a->read(2).arrays.at("latents").data(), x.bytes()), 0);
  EXPECT_NE(std::memcmp(x.data(), d->read(1).arrays.at("latents").data(), x.bytes()), 0);
  double sum = 0, squares = 0, fourths = 0;
  for (float v : x.view<float>()) sum += v, squares += v * v, fourths += std::pow(v, 4);
  EXPECT_NEAR(sum / 5000, 0, 0.06);
  EXPECT_NEAR(squares / 5000, 1, 0.08);
  EXPECT_NEAR(fourths / 5000, 3, 0.5);
  EXPECT_EQ(a->read(0).arrays.at("label").view<int32_t>()[1], 0);
}

// S2-3, S2-59
TEST(Source, SyntheticArraysWithoutANumberNeverEnd) {
  const auto source = open_source({.dataset_type = "synthetic", .synthetic_arrays = {{"latents", {DType::f32, {2}}}}});
  EXPECT_EQ(source->size(), -1);
  RecordStream whole(source, {.seed = 3, .window = 4}), rest(source, {.seed = 3, .window = 4});
  constexpr size_t kRecords = 1100;  // more than the default number of images
  std::vector<std::string> names;
  std::set<std::vector<double>> numbers;
  Position middle;
  for (size_t i = 0; i < kRecords; ++i) {
    if (i == 17) middle = whole.position();
    const auto next = whole.next();
    EXPECT_EQ(next.epoch, 0);
    const Record record = next.read();
    names.push_back(record.name);
    numbers.insert(record.arrays.at("latents").to_doubles());
  }
  EXPECT_EQ(std::set<std::string>(names.begin(), names.end()).size(), kRecords);
  EXPECT_EQ(numbers.size(), kRecords);
  rest.seek(middle);
  for (size_t i = 17; i < kRecords; ++i) EXPECT_EQ(rest.next().read().name, names[i]);
}

TEST(Source, StreamsOfFilesGoOnFromASavedPosition) {
  const std::vector<DataSourceConfig> kinds = {
      {.dataset_type = "hf", .train_data_dir = kFiles + "/parquet"},
      {.dataset_type = "hf", .train_data_dir = kFiles + "/saved"},
      {.dataset_type = "tfrecord", .train_data_dir = kFiles + "/pictures.tfrecord"},
      {.dataset_type = "tfrecord", .train_data_dir = kFiles + "/pictures.tfrecord", .max_train_samples = 5},
      {.dataset_type = "webdataset", .train_data_dir = kFiles + "/shard-*.tar"},
      {.dataset_type = "webdataset", .train_data_dir = kFiles + "/shard-*.tar", .max_train_samples = 5},
      {.dataset_type = "grain", .grain_train_files = put("p.array_record", array_record("zstd"))}};
  for (const auto& kind : kinds) {
    const auto source = open_source(kind);
    const StreamConfig c{.seed = 8, .window = 3};
    RecordStream whole(source, c);
    std::vector<std::string> names;
    std::vector<Position> cuts;
    for (int i = 0; i < 20; ++i) {
      cuts.push_back(whole.position());
      names.push_back(whole.next().read().name);
    }
    for (size_t cut = 0; cut < 20; ++cut) {
      RecordStream s(source, c);
      s.seek(cuts[cut]);
      for (size_t i = cut; i < 20; ++i)
        ASSERT_EQ(s.next().read().name, names[i]) << source->name() << " cut " << cut << " at " << i;
    }
  }
}

TEST(Source, MissingColumnsListThoseThatAreThere) {
  EXPECT_ERROR(open_source({.dataset_type = "hf", .train_data_dir = kFiles + "/plain.parquet"}),
               "plain.parquet: no column 'image'; it has: picture, captions");
  EXPECT_ERROR(open_source({.dataset_type = "hf", .train_data_dir = kFiles + "/saved", .caption_column = "caption"}),
               "no column 'caption'; it has: image, text");
  EXPECT_ERROR(all_of({.dataset_type = "tfrecord", .train_data_dir = kFiles + "/laion"}),
               "no column 'image'; it has: clip_embeddings, moments");
  EXPECT_ERROR(
      all_of({.dataset_type = "tfrecord", .train_data_dir = kFiles + "/sdxl.tfrecord", .array_columns = kLaionColumns}),
      "no column 'moments|latents'; it has: input_ids, pixel_values, prompt_embeds, text_embeds");
  EXPECT_ERROR(all_of({.train_data_dir = kFiles + "/shard-000000.tar", .caption_column = "title"}),
               "no key 'title'; it has: text");
}

TEST(Source, WrongTypesAreNamed) {
  EXPECT_ERROR(all_of({.dataset_type = "hf",
                       .train_data_dir = kFiles + "/arrays.parquet",
                       .image_column = "moments",
                       .caption_column = "number"}),
               "column 'moments' is ");
  EXPECT_ERROR(all_of({.dataset_type = "hf", .train_data_dir = kFiles + "/parquet", .array_columns = {"text"}}),
               "column 'text' is string; expected numbers");
  EXPECT_ERROR(
      all_of({.dataset_type = "tfrecord", .train_data_dir = kFiles + "/pictures.tfrecord", .array_columns = {"text"}}),
      "expected a serialized TensorProto");
}

// S4-49, S4-51
TEST(Source, UnknownKindsAndPlacesAreRefused) {
  const auto config_error = [](const DataSourceConfig& c) {
    return error_of([&] { open_source(c); }, Code::invalid_config);
  };
  EXPECT_NE(config_error({.dataset_type = "mosaic"})
                .find("dataset_type is 'mosaic'; expected one of: image_folder, clip_folder, webdataset, tfrecord, "
                      "grain, hf, tf, synthetic"),
            std::string::npos);
  EXPECT_NE(config_error({}).find("train_data_dir is empty; expected"), std::string::npos);
  EXPECT_NE(config_error({.dataset_name = "diffusers/pokemon"}).find("this function downloads nothing"),
            std::string::npos);
  EXPECT_NE(config_error(
                {.dataset_type = "webdataset", .train_data_dir = kFiles + "/shard-000000.tar", .array_columns = {"x"}})
                .find("encoded samples are read from"),
            std::string::npos);
  EXPECT_ERROR(open_source({.dataset_type = "hf", .train_data_dir = "/nowhere"}), "'/nowhere': no such file or folder");
  EXPECT_ERROR(open_source({.dataset_type = "hf", .train_data_dir = kFiles + "/*.png"}), "no file matches");
  EXPECT_ERROR(open_source({.dataset_type = "webdataset", .train_data_dir = kFiles + "/laion"}), "no .tar file");
  EXPECT_ERROR(open_source({.dataset_type = "hf", .train_data_dir = "ftp://x/y.parquet"}),
               "files are read from folders of this machine, gs:// and s3://");
}

TEST(Source, ImagesThatDoNotDecodeAreNamedSkippedAndCounted) {
  const auto tar = read_file(kFiles + "/shard-000000.tar");
  std::string damaged = tar;
  for (size_t at = damaged.find("\x89PNG"); at != std::string::npos; at = damaged.find("\x89PNG")) damaged[at] = 'x';
  const LoadedImages l = load_images(open_source({.train_data_dir = put("two_bad.tar", damaged)}), {.resolution = 8});
  EXPECT_EQ(l.pixels.dims()[0], 2);
  ASSERT_EQ(l.skipped.size(), 2u);
  EXPECT_NE(l.skipped[0].find("two_bad.tar 00000: not a PNG"), std::string::npos) << l.skipped[0];
  for (const char* start : {"\xff\xd8\xff", "RIFF"}) {
    for (size_t at = damaged.find(start); at != std::string::npos; at = damaged.find(start)) damaged[at] = 'x';
  }
  EXPECT_ERROR(load_images(open_source({.train_data_dir = put("all_bad.tar", damaged)}), {.resolution = 8}),
               "none of 4 images can be decoded");
}

TEST(Source, DamagedFilesSayWhere) {
  const std::string record = read_file(kFiles + "/pictures.tfrecord");
  std::string bad = record;
  bad[40] ^= 1;
  EXPECT_ERROR(all_of({.train_data_dir = put("bad.tfrecord", bad)}), "record at byte 0: its checksum is wrong");
  bad = record;
  bad[1] ^= 1;
  EXPECT_ERROR(all_of({.train_data_dir = put("bad.tfrecord", bad)}), "not a TFRecord file");
  EXPECT_ERROR(all_of({.train_data_dir = put("bad.tfrecord", record.substr(0, record.size() - 2))}), "is truncated");
  EXPECT_ERROR(all_of({.dataset_type = "tfrecord", .train_data_dir = kFiles + "/zstd.array_record.gz"}), "gzipped");
  std::string grain = array_record("zstd");
  grain[200] ^= 1;
  EXPECT_ERROR(all_of({.train_data_dir = put("bad.array_record", grain)}), "its checksum is wrong");
  EXPECT_ERROR(all_of({.train_data_dir = put("bad.array_record", grain.substr(0, 70000))}), "bad.array_record: ");
  const std::string arrow = read_file(kFiles + "/saved/train/data-00000-of-00002.arrow");
  EXPECT_ERROR(all_of({.train_data_dir = put("bad.arrow", arrow.substr(0, arrow.size() / 2))}), "is truncated");
  const std::string parquet = read_file(kFiles + "/plain.parquet");
  EXPECT_ERROR(all_of({.train_data_dir = put("bad.parquet", parquet.substr(0, parquet.size() / 2))}), "bad.parquet: ");
}

TEST(Source, DamageNeverCrashes) {
  const DataSourceConfig plain{.image_column = "picture", .caption_column = "captions"};
  expect_no_crash(read_file(kFiles + "/plain.parquet"), "x.parquet", plain, true);
  expect_no_crash(read_file(kFiles + "/plain.arrow"), "x.arrow", plain, true);
  expect_no_crash(read_file(kFiles + "/saved/train/data-00000-of-00002.arrow"), "y.arrow", {}, false);
  expect_no_crash(read_file(kFiles + "/pictures.tfrecord"), "x.tfrecord", {}, false);
  expect_no_crash(read_file(kFiles + "/shard-000000.tar"), "x.tar", {}, false);
  expect_no_crash(array_record("snappy"), "x.array_record", {}, true);
}

TEST(Source, FingerprintFollowsFilesAndColumns) {
  const auto print = [](const DataSourceConfig& c) { return open_source(c)->fingerprint(); };
  const std::string file = put("print.tfrecord", read_file(kFiles + "/pictures.tfrecord"));
  const std::string before = print({.train_data_dir = file});
  EXPECT_EQ(before, print({.train_data_dir = file}));
  EXPECT_NE(before, print({.train_data_dir = file, .caption_column = "x"}));
  EXPECT_NE(before, print({.train_data_dir = file, .max_train_samples = 3}));
  fs::last_write_time(file, fs::last_write_time(file) + std::chrono::seconds(1));
  EXPECT_NE(before, print({.train_data_dir = file}));
}

/// What has changed between two opened sources.
std::string change_of(const DataSourceConfig& then, const DataSourceConfig& now) {
  return change_between(open_source(then)->identity(), open_source(now)->identity());
}

TEST(DataIdentity, OfAFolderSaysWhatHasChanged) {
  const std::string folder = scratch() / "identity";
  const auto write = [&](const std::vector<std::string>& names, const std::string& caption) {
    fs::remove_all(folder);
    make_folders(folder);
    for (const std::string& name : names) {
      write_file_atomic(folder + "/" + name + ".png", expected()[0].image);
      write_file_atomic(folder + "/" + name + ".txt", caption + name);
    }
    return open_source({.train_data_dir = folder})->identity();
  };
  const DataIdentity then = write({"0", "1", "2"}, "heart ");
  EXPECT_EQ(then.samples, 3);
  EXPECT_EQ(write({"0", "1", "2"}, "heart "), then);  // other times
  EXPECT_EQ(change_between(then, write({"0", "2"}, "heart ")), "it had 3 samples and has 2");
  EXPECT_EQ(change_between(then, write({"0", "1", "2", "3"}, "heart ")), "it had 3 samples and has 4");
  EXPECT_EQ(change_between(then, write({"0", "1", "4"}, "heart ")), "its 3 samples have other names");
  EXPECT_EQ(change_between(then, write({"0", "1", "2"}, "heard ")), "its 3 samples have other captions");
  EXPECT_EQ(change_between(then, {}), "");  // not known
  EXPECT_EQ(change_between({}, then), "");
  // Two folders that are trained on together.
  const DataIdentity other = write({"5", "6"}, "");
  EXPECT_EQ(combined(then, other).samples, 5);
  EXPECT_EQ(change_between(combined(then, other), combined(then, write({"5"}, ""))), "it had 5 samples and has 4");
  EXPECT_EQ(change_between(combined(then, other), combined(then, write({"5", "7"}, ""))),
            "its 5 samples have other names");
}

TEST(DataIdentity, OfFilesOfManyRecordsIsTheirNamesAndSizes) {
  const std::string other = "the files of its samples have other names or sizes";
  for (const auto& [name, bytes, longer] : std::vector<std::tuple<std::string, std::string, std::string>>{
           {"1.tar", read_file(kFiles + "/shard-000000.tar"),
            read_file(kFiles + "/shard-000000.tar") + std::string(1024, '\0')},
           {"1.tfrecord", read_file(kFiles + "/pictures.tfrecord"),
            read_file(kFiles + "/pictures.tfrecord") + read_file(kFiles + "/pictures.tfrecord")}}) {
    SCOPED_TRACE(name);
    const DataSourceConfig then{.train_data_dir = put("then/" + name, bytes)};
    EXPECT_EQ(change_of(then, {.train_data_dir = put("copied/" + name, bytes)}), "");
    EXPECT_EQ(change_of(then, {.train_data_dir = put("now/2" + name, bytes)}), other);
    EXPECT_EQ(change_of(then, {.train_data_dir = put("larger/" + name, longer)}), other);
    EXPECT_EQ(change_of(then, {.train_data_dir = kFiles + "/pictures"}), "it is data of another kind");
  }
  const DataSourceConfig columns{.image_column = "picture", .caption_column = "captions"};
  const auto tables = [&](const std::string& folder, int files) {
    for (int i = 0; i < files; ++i) put(fmt::format("{}/{}.parquet", folder, i), read_file(kFiles + "/plain.parquet"));
    DataSourceConfig config = columns;
    config.train_data_dir = scratch() / folder;
    return config;
  };
  EXPECT_EQ(change_of(tables("one", 1), tables("copy", 1)), "");
  EXPECT_EQ(change_of(tables("two", 2), tables("one", 1)),
            fmt::format("it had {} samples and has {}", 2 * kRecords, kRecords));
  DataSourceConfig renamed = columns;
  renamed.train_data_dir = put("renamed/3.parquet", read_file(kFiles + "/plain.parquet"));
  EXPECT_EQ(change_of(tables("one", 1), renamed),
            fmt::format("the files of its {} samples have other names or sizes", kRecords));
}

TEST(TfrecordShards, AreReadBackAndAppearOnlyWhenWhole) {
  const std::string folder = scratch() / "written";
  {
    TfrecordShards lost(folder, 3);
    lost.add({{"moments", expected_moments(0)}});
  }
  EXPECT_FALSE(fs::exists(folder));
  // Files of a killed process are replaced and never read.
  put(".written.unfinished/file_00-3.tfrec", "half");
  TfrecordShards shards(folder, 3);
  for (int64_t i = 0; i < kRecords; ++i)
    shards.add({{"latents", expected_moments(i)}, {"hidden_states", expected_clip(i).cast(DType::bf16)}});
  EXPECT_FALSE(fs::exists(folder));
  shards.close();
  EXPECT_EQ(std::distance(fs::directory_iterator(folder), {}), 3);
  EXPECT_TRUE(fs::exists(folder + "/file_02-9.tfrec"));
  EXPECT_FALSE(fs::exists(scratch() / ".written.unfinished"));
  EXPECT_ERROR(TfrecordShards(folder, 3), "not empty; expected a new folder");
  EXPECT_ERROR(TfrecordShards("gs://bucket/x", 3), "local folder");
  EXPECT_ERROR(TfrecordShards(scratch() / "none", 3).close(), "no record");
  const auto read = all_of({.train_data_dir = folder, .array_columns = kLaionColumns});
  ASSERT_EQ(read.size(), static_cast<size_t>(kRecords));
  for (int64_t i = 0; i < kRecords; ++i) {
    expect_same(read[static_cast<size_t>(i)].arrays.at("moments"), expected_moments(i));
    expect_same(read[static_cast<size_t>(i)].arrays.at("clip_embeddings"), expected_clip(i).cast(DType::bf16));
  }
}

TEST(Jpeg, DecodesSmallerWhenMuchLargerThanWanted) {
  const std::string jpeg = expected()[1].image;  // 12 × 9
  const auto decoded = [&](int64_t side) { return decode_image_bytes(jpeg.data(), jpeg.size(), "it", side).dims(); };
  EXPECT_EQ(decoded(0), (Dims{9, 12, 3}));
  EXPECT_EQ(decoded(5), (Dims{9, 12, 3}));
  EXPECT_EQ(decoded(3), (Dims{9, 12, 3}));
  EXPECT_EQ(decoded(2), (Dims{5, 6, 3}));
  EXPECT_EQ(decoded(1), (Dims{3, 3, 3}));
}

TEST(Source, LocalFilesLoadNothingThatReadsBuckets) {
  EXPECT_FALSE(
      all_of({.train_data_dir = kFiles + "/plain.parquet", .image_column = "picture", .caption_column = "captions"})
          .empty());
  const std::string maps = [] {
    std::ifstream f("/proc/self/maps");
    return std::string(std::istreambuf_iterator<char>(f), {});
  }();
  EXPECT_NE(maps.find("md_arrow.so"), std::string::npos);
  for (const char* library : {"md_remote.so", "arrow_s3"}) EXPECT_EQ(maps.find(library), std::string::npos) << library;
}

}  // namespace
}  // namespace md
