#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/base/files.h"
#include "maxdiffusion/base/temporary_folder.h"
#include "maxdiffusion/data/records/open_source.h"
#include "maxdiffusion/media/image.h"
#include "maxdiffusion/media/test_videos.h"
#include "maxdiffusion/media/write_video.h"

namespace md {
namespace {

namespace fs = std::filesystem;

void put(const TemporaryFolder& folder, const std::string& name, const std::string& bytes) {
  make_folders(fs::path(folder / name).parent_path());
  write_file_atomic(folder / name, bytes);
}
const std::string& video() {
  static const std::string bytes = encode_mp4(grey_frames(5, 16, 16), {.threads = 1}, "it");
  return bytes;
}
std::string image(int level) {
  HostArray a(Shape{DType::u8, {16, 16, 3}});
  std::ranges::fill(a.mutable_view<uint8_t>(), static_cast<uint8_t>(level));
  return encode_png(a);
}
std::string error_of(const DataSourceConfig& config) {
  try {
    open_source(config);
    return "no error";
  } catch (const Error& e) {
    EXPECT_EQ(e.code(), Code::io);
    return e.what();
  }
}

TEST(ClipFolder, HoldsVideosAndFoldersOfFramesWithCaptions) {
  const TemporaryFolder folder;
  put(folder, "b.mp4", video());
  put(folder, "b.txt", "from the text file \n");
  put(folder, "a/x.WEBM", video());
  put(folder, "a/metadata.jsonl", R"({"file_name": "x.WEBM", "text": "from metadata"})");
  put(folder, "a/x.jpg", "a thumbnail");
  put(folder, "cover.png", image(1));
  for (int i = 1; i < 12; ++i) put(folder, fmt::format("frames.v1/{}.png", i), image(i));
  put(folder, "frames.v1.txt", "a folder of frames");
  put(folder, "more/frames/0001.jpeg", "x");
  put(folder, "more/metadata.csv", "file_name,text\nframes/,a folder in a table\n");
  put(folder, ".hidden/y.mp4", video());
  put(folder, "bare.gif", "GIF89a");
  const auto source = open_source({.dataset_type = "clip_folder", .train_data_dir = folder.path()});
  std::vector<std::string> found;
  for (int64_t i = 0; i < source->size(); ++i) {
    const Record r = source->read(i);
    EXPECT_EQ(r.fault, "");
    found.push_back(fs::relative(r.name, folder.path()).string() + ": " + r.caption);
    EXPECT_EQ(r.frames.empty(), found.back().find("frames") != 0 && found.back().find("more") != 0) << r.name;
  }
  EXPECT_EQ(found, (std::vector<std::string>{"a/x.WEBM: from metadata", "b.mp4: from the text file", "bare.gif: ",
                                             "frames.v1: a folder of frames", "more/frames: a folder in a table"}));
  const Record frames = source->read(3);
  ASSERT_EQ(frames.frames.size(), 11u);
  for (int i = 1; i < 12; ++i) EXPECT_EQ(frames.frames[static_cast<size_t>(i - 1)].bytes, image(i));  // 9 before 10
}

TEST(ClipFolder, IsRecognizedByItsVideosUnlessItHoldsImages) {
  const TemporaryFolder folder;
  put(folder, "a.mp4", video());
  EXPECT_NE(open_source({.train_data_dir = folder.path()})->name().find("clip folder"), std::string::npos);
  EXPECT_NE(open_source({.dataset_name = folder.path()})->name().find("clip folder"), std::string::npos);
  EXPECT_NE(open_source({.dataset_type = "hf", .train_data_dir = folder.path()})->name().find("clip folder"),
            std::string::npos);
  put(folder, "b.png", image(1));
  EXPECT_NE(open_source({.train_data_dir = folder.path()})->name().find("image folder"), std::string::npos);
}

TEST(ClipFolder, FingerprintKnowsEveryFrame) {
  const TemporaryFolder folder;
  for (int i = 0; i < 3; ++i) put(folder, fmt::format("it/{}.png", i), image(i));
  const auto print = [&] {
    return open_source({.dataset_type = "clip_folder", .train_data_dir = folder.path()})->fingerprint();
  };
  const std::string before = print();
  EXPECT_EQ(print(), before);
  put(folder, "it/2.png", image(200) + "longer");
  EXPECT_NE(print(), before);
}

TEST(ClipFolder, BadFoldersAreErrorsThatSayWhatToTry) {
  const TemporaryFolder folder;
  const DataSourceConfig config{.dataset_type = "clip_folder", .train_data_dir = folder / "it"};
  EXPECT_NE(error_of(config).find("no such folder"), std::string::npos) << error_of(config);
  put(folder, "it/a.txt", "a caption");
  put(folder, "it/cover.png", image(1));
  EXPECT_NE(
      error_of(config).find("clip folder '" + folder / "it" +
                            "': no clips (mp4, mov, mkv, webm, avi, gif, animated webp, or folders of png or jpeg"),
      std::string::npos)
      << error_of(config);
  EXPECT_NE(error_of(config).find("captions without clips"), std::string::npos) << error_of(config);
  put(folder, "it/metadata.jsonl", R"({"file_name": "none.mp4", "text": "x"})");
  EXPECT_NE(error_of(config).find("metadata.jsonl:1: names '"), std::string::npos) << error_of(config);
}

}  // namespace
}  // namespace md
