#include "maxdiffusion/data/records/image_folder.h"

#include <gtest/gtest.h>
#include <sys/stat.h>

#include <filesystem>
#include <fstream>
#include <functional>
#include <nlohmann/json.hpp>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/base/files.h"
#include "maxdiffusion/base/parse_json.h"
#include "maxdiffusion/base/temporary_folder.h"
#include "maxdiffusion/data/images/load_images.h"
#include "maxdiffusion/data/records/open_source.h"

namespace md {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

// Images and Pillow's results for them; see tools/golden/images.py.
const json& golden() {
  static const json g = parse_json(read_file(MD_SOURCE_DIR "/tests/golden/data/pictures.json"));
  return g;
}
std::string from_hex(const std::string& hex) {
  std::string bytes;
  for (size_t i = 0; i < hex.size(); i += 2) bytes += static_cast<char>(std::stoi(hex.substr(i, 2), nullptr, 16));
  return bytes;
}
HostArray image_of(const std::string& hex, int64_t h, int64_t w) {
  const std::string bytes = from_hex(hex);
  return HostArray::of<uint8_t>(Shape{DType::u8, {h, w, 3}},
                                {reinterpret_cast<const uint8_t*>(bytes.data()), bytes.size()});
}
std::string file_of(const std::string& name) {
  for (const json& row : golden()["files"]) {
    if (row["name"] == name) return from_hex(row["file"]);
  }
  ADD_FAILURE() << "no image " << name;
  return "";
}
int largest_difference(const HostArray& a, const HostArray& b) {
  int most = 0;
  for (size_t i = 0; i < a.view<uint8_t>().size(); ++i)
    most = std::max(most, std::abs(a.view<uint8_t>()[i] - b.view<uint8_t>()[i]));
  return most;
}
HostArray decode(const std::string& bytes) { return decode_image_bytes(bytes.data(), bytes.size(), "it"); }

LoadedImages load(const std::string& folder, const ImageConfig& config) {
  return load_images(open_source({.dataset_type = "image_folder", .train_data_dir = folder}), config);
}

// Deleted at program exit.
const TemporaryFolder& root() {
  static const TemporaryFolder folder;
  return folder;
}
struct Folder {
  std::string path;
  explicit Folder(const std::string& name) : path(root() / name) {
    fs::remove_all(path);
    fs::create_directories(path);
  }
  const Folder& put(const std::string& name, const std::string& bytes) const {
    fs::create_directories((fs::path(path) / name).parent_path());
    std::ofstream(fs::path(path) / name, std::ios::binary) << bytes;
    return *this;
  }
};
std::string error_of(const std::function<void()>& f) {
  try {
    f();
  } catch (const Error& e) {
    EXPECT_EQ(e.code(), Code::io);
    return e.what();
  }
  return "no error";
}
#define EXPECT_ERROR(statement, text)                            \
  do {                                                           \
    const std::string message = error_of([&] { statement; });    \
    EXPECT_NE(message.find(text), std::string::npos) << message; \
  } while (false)

TEST(Decode, EveryKindOfImageLooksAsInPillow) {
  for (const json& row : golden()["files"]) {
    SCOPED_TRACE(row["name"].get<std::string>());
    const HostArray expected = image_of(row["rgb"], row["height"], row["width"]);
    const HostArray found = decode(from_hex(row["file"]));
    ASSERT_EQ(found.dims(), expected.dims());
    EXPECT_LE(largest_difference(found, expected), row["tolerance"].get<int>());
  }
}

TEST(Decode, TruncatedImagesSaySo) {
  for (const json& row : golden()["files"]) {
    const std::string bytes = from_hex(row["file"]);
    SCOPED_TRACE(row["name"].get<std::string>());
    for (double part : {0.3, 0.6, 0.9}) {
      const std::string cut = bytes.substr(0, static_cast<size_t>(static_cast<double>(bytes.size()) * part));
      const std::string message = error_of([&] { decode(cut); });
      EXPECT_TRUE(message.starts_with("it: ")) << message;
    }
  }
}

TEST(Decode, FlippedBytesNeverCrash) {
  for (const json& row : golden()["files"]) {
    const std::string bytes = from_hex(row["file"]);
    for (size_t i = 0; i < bytes.size(); i += 3) {
      std::string bad = bytes;
      bad[i] = static_cast<char>(bad[i] ^ (i % 2 ? 0xff : 0x10));
      try {
        decode(bad);
      } catch (const Error& e) {
        EXPECT_EQ(e.code(), Code::io) << e.what();
      }
    }
  }
}

TEST(Decode, CorruptPngIsFoundByItsChecksum) {
  std::string bytes = file_of("rgb.png");
  bytes[bytes.find("IDAT") + 12] ^= 0x55;
  EXPECT_ERROR(decode(bytes), "it: PNG: ");
}

TEST(Decode, SizesThatNoImageHasAreRefusedBeforeMemoryIsTaken) {
  // A PNG header with a valid checksum that claims 60000 × 60000: libpng accepts it, our reader must not.
  const std::string png = from_hex("89504e470d0a1a0a0000000d494844520000ea600000ea6008020000000fb0e215");
  const std::string message = error_of([&] { decode(png + file_of("rgb.png").substr(33)); });
  EXPECT_NE(message.find("60000x60000"), std::string::npos) << message;
  std::string jpeg = file_of("rgb.jpg");
  const size_t sof = jpeg.find("\xff\xc0");
  for (size_t i : {5, 6, 7, 8}) jpeg[sof + i] = '\xf0';
  EXPECT_ERROR(decode(jpeg), "61680x61680");
}

TEST(Decode, OtherFilesAreNamedForWhatTheyStartWith) {
  EXPECT_ERROR(decode("8BPS 2"), "not a PNG, JPEG, WebP, GIF, BMP, TIFF or AVIF image (starts with 38 42 50 53 20 32)");
  EXPECT_ERROR(decode("GIF89a"), "it: ");
  EXPECT_ERROR(decode(""), "empty");
  EXPECT_ERROR(decode_image("/nowhere/a.png"), "/nowhere/a.png");
  EXPECT_EQ(decode(from_hex(golden()["animated_webp"])).dims(), (Dims{4, 4, 3}));
}

// The same image in formats that FFmpeg reads, written and decoded by Pillow 12.
const std::map<std::string, std::string> kOtherFormats = {
    {"bmp",
     "424d760000000000000036000000280000000500000004000000010018000000000040000000c40e0000c40e00000000000000000000c80e2"
     "7"
     "aa134f8c18776e1d9f5022c700c8b41aaab9428cbe6a6ec39250c8ba00c85a0daa5f358c645d6e6985506ead00c80000aa05288c0a506e0f7"
     "8"
     "5014a000"},
    {"gif",
     "47494638376105000400840000bac85092c36e6abe8c42b9aaad6e501ab4c885696e5d648cc72250355faa0d5ac89f1d6ea01450780f6e771"
     "8"
     "8c500a8c4f13aa2805aa270ec80000c80000000000000000000000000000000000000000000000000000000000000000000000002c0000000"
     "0"
     "0500040000081900274478d080818204070c1028304040000012203858802020003b"},
    {"tiff",
     "49492a00080000000a0000010400010000000500000001010400010000000400000002010300030000008600000003010300010000000100"
     "000006010300010000000200000011010400010000008c0000001501030001000000030000001601040001000000040000001701040001000"
     "0"
     "003c0000001c0103000100000001000000000000000800080008000000c82805aa500a8c780f6ea014500d5ac8355faa5d648c85696ead6e5"
     "0"
     "1ab4c842b9aa6abe8c92c36ebac850270ec84f13aa77188c9f1d6ec72250"},
    {"avif",
     "00000020667479706176696600000000617669666d6966316d6961664d413141000000eb6d657461000000000000002168646c72000000000"
     "0"
     "00000070696374000000000000000000000000000000000e7069746d0000000000010000001e696c6f6300000000440000010001000000010"
     "0"
     "000113000000500000002869696e660000000000010000001a696e6665020000000001000061763031436f6c6f72000000006a69707270000"
     "0"
     "004b6970636f0000001469737065000000000000000500000004000000107069786900000000030808080000000c617631438120000000000"
     "0"
     "13636f6c726e636c780001000d0006800000001769706d61000000000000000100010401028304000000586d64617412000a08380866c2021"
     "a"
     "0d203242100000f7f7085f7da045ebdec01aae2d0a94dca99cd761399e5a9e63c65dfe8424b7f9ee45470caecc7463d4297b8993d3165a06e"
     "8"
     "1dff203ec561cb4309ff63b8c0"}};

TEST(Decode, OtherFormatsLookAsInPillow) {
  const HostArray lossless = image_of(
      "0000c82805aa500a8c780f6ea014500d5ac8355faa5d648c85696ead6e501ab4c842b9aa6abe8c92c36ebac850270ec84f13aa77"
      "188c9f1d6ec72250",
      4, 5);
  for (const auto& [format, hex] : kOtherFormats) {
    SCOPED_TRACE(format);
    const std::string bytes = from_hex(hex);
    const HostArray read = decode(bytes);
    ASSERT_EQ(read.dims(), lossless.dims());
    EXPECT_LE(largest_difference(read, lossless), format == "avif" ? 4 : 0);
    for (size_t n = 0; n < bytes.size(); n += 7) {  // truncated: an error or an image, never a crash
      try {
        decode(bytes.substr(0, n));
      } catch (const Error& e) {
        EXPECT_EQ(e.code(), Code::io);
      }
    }
  }
}

TEST(ImageFolder, FifosAreLeftOutAndCounted) {
  const Folder f("fifos");
  f.put("a.png", "x").put("notes.doc", "x");
  ASSERT_EQ(::mkfifo((f.path + "/b.png").c_str(), 0600), 0);
  ASSERT_EQ(::mkfifo((f.path + "/metadata.jsonl").c_str(), 0600), 0);
  testing::internal::CaptureStderr();
  EXPECT_EQ(list_image_folder(f.path, {}).size(), 1u);
  const std::string log = testing::internal::GetCapturedStderr();
  EXPECT_NE(log.find("'" + f.path + "': 3 files of other kinds are ignored: 1 .doc, 2 no regular file"),
            std::string::npos)
      << log;
}

TEST(ImageFolder, LinksStayInsideAndAreCounted) {
  const Folder f("links"), elsewhere("elsewhere");
  elsewhere.put("secret.png", "x").put("deep/other.png", "x");
  f.put("a.png", "x").put("sub/b.png", "x");
  fs::create_directory_symlink(".", f.path + "/loop");
  fs::create_directory_symlink("../sub", f.path + "/sub/again");
  fs::create_directory_symlink(elsewhere.path, f.path + "/out");
  fs::create_symlink(elsewhere.path + "/secret.png", f.path + "/c.png");
  fs::create_symlink("nowhere.png", f.path + "/dangling.png");
  fs::create_symlink("a.png", f.path + "/same.png");
  const auto names = [](const std::string& folder, bool follow_links = false) {
    std::vector<std::string> all;
    for (const ImageItem& item : list_image_folder(folder, {.follow_links = follow_links})) all.push_back(item.name);
    return all;
  };
  testing::internal::CaptureStderr();
  EXPECT_EQ(names(f.path, true), (std::vector<std::string>{"a.png", "c.png", "out/deep/other.png", "out/secret.png",
                                                           "same.png", "sub/b.png"}));
  EXPECT_NE(testing::internal::GetCapturedStderr().find("3 links are not followed"), std::string::npos);
  testing::internal::CaptureStderr();
  EXPECT_EQ(names(f.path), (std::vector<std::string>{"a.png", "same.png", "sub/b.png"}));
  const std::string log = testing::internal::GetCapturedStderr();
  EXPECT_NE(log.find("5 links are not followed; the first is " + f.path + "/c.png: it leads to '" +
                     fs::canonical(elsewhere.path).string() + "/secret.png'; try: follow_links=true"),
            std::string::npos)
      << log;
  // A symlink to the folder, and a snapshot of the Hugging Face cache.
  fs::create_directory_symlink(f.path, root() / "links_by_link");
  EXPECT_EQ(names(root() / "links_by_link").size(), 3u);
  const Folder hub("datasets--me--mine");
  hub.put("blobs/123", "x").put("snapshots/abc/readme.txt", "x");
  fs::create_symlink("../../blobs/123", hub.path + "/snapshots/abc/a.png");
  EXPECT_EQ(names(hub.path + "/snapshots/abc"), std::vector<std::string>{"a.png"});
  for (const std::string& name :
       {std::string("/etc/passwd"), std::string("../elsewhere/secret.png"), std::string("..")}) {
    f.put("metadata.jsonl", json{{"file_name", name}, {"text", "x"}}.dump());
    EXPECT_ERROR(names(f.path), "metadata.jsonl:1: names '" + name + "', which is not inside of '" + f.path + "'");
  }
  f.put("metadata.jsonl", R"({"file_name": "c.png", "text": "x"})");  // a symlink that leaves the folder
  EXPECT_ERROR(names(f.path), "which does not exist");
  f.put("metadata.jsonl", R"({"file_name": "sub/../a.png", "text": "mine"})");
  EXPECT_EQ(list_image_folder(f.path, {})[0].caption, "mine");
}

TEST(ImageFolder, OtherFilesAreCounted) {
  const Folder f("odd");
  f.put("a.png", "x").put("b.gif", "x").put("d.heic", "x").put("e.HEIC", "x").put("notes.md", "x");
  testing::internal::CaptureStderr();
  EXPECT_EQ(list_image_folder(f.path, {}).size(), 2u);
  const std::string log = testing::internal::GetCapturedStderr();
  EXPECT_NE(log.find("3 files of other kinds are ignored: 2 .heic, 1 .md"), std::string::npos) << log;
}

TEST(ImageFolder, CaptionsAreTextInUtf8OrInUtf16WithAMark) {
  const std::string wide("\xff\xfeg\0r\0\xfc\0n\0", 10);
  const Folder f("encodings");
  f.put("a.png", "x").put("b.png", "x").put("c.png", "x");
  f.put("a.txt", "\xef\xbb\xbf a cat\r\n").put("b.txt", "gr\xc3\xbcn").put("c.txt", wide);
  const std::vector<ImageItem> items = list_image_folder(f.path, {});
  ASSERT_EQ(items.size(), 3u);
  EXPECT_EQ(items[0].caption, "a cat");
  EXPECT_EQ(items[1].caption, "gr\xc3\xbcn");
  EXPECT_EQ(items[2].caption, "gr\xc3\xbcn");
  f.put("b.txt", "one\ngr\xfcn");
  EXPECT_ERROR(list_image_folder(f.path, {}), f.path + "/b.txt:2: byte FC, which is not UTF-8");
  f.put("metadata.jsonl",
        "\xef\xbb\xbf{\"file_name\": \"a.png\", \"text\": \"a\", \"score\": NaN}\r\n{\"file_name\": "
        "\"b.png\", \"text\": \"b\"}\n{\"file_name\": \"c.png\", \"text\": \"c\"}\n");
  EXPECT_EQ(list_image_folder(f.path, {})[0].caption, "a");  // Python writes the mark, and NaN
  f.put("metadata.jsonl",
        "{\"file_name\": \"a.png\", \"text\": \"a\"}\n{\"file_name\": \"b.png\", \"text\": \"\xfc\"}\n");
  EXPECT_ERROR(list_image_folder(f.path, {}), "metadata.jsonl:2: byte FC");
}

TEST(ImageFolder, EndingsOfCaptionsMayBeInCapitals) {
  const Folder f("capitals");
  f.put("0.JPG", "x").put("1.png", "x").put("0.TXT", "zero").put("1.txt", "one").put("1.TXT", "other");
  const std::vector<ImageItem> items = list_image_folder(f.path, {});
  ASSERT_EQ(items.size(), 2u);
  EXPECT_EQ(items[0].caption, "zero");
  EXPECT_EQ(items[1].caption, "one");
}

TEST(ImageFolder, ImagesThatDifferInTheirExtensionShareACaption) {
  const Folder f("shared");
  f.put("1.jpg", "x").put("1.png", "x").put("2.png", "x").put("1.txt", "both");
  testing::internal::CaptureStderr();
  const std::vector<ImageItem> items = list_image_folder(f.path, {});
  const std::string log = testing::internal::GetCapturedStderr();
  ASSERT_EQ(items.size(), 3u);
  EXPECT_EQ(items[0].caption, "both");
  EXPECT_EQ(items[1].caption, "both");
  EXPECT_EQ(items[2].caption, "");
  EXPECT_NE(log.find("1 of 3 images has no caption (metadata.jsonl or .txt): it trains with an empty caption"),
            std::string::npos)
      << log;
}

// S4-56, S4-57
TEST(Resize, AgreesWithPillowByteForByte) {
  for (const json& row : golden()["resized"]) {
    const int64_t r = row["resolution"];
    SCOPED_TRACE(fmt::format("{}x{} to {}", row["height"].get<int>(), row["width"].get<int>(), r));
    const ImageConfig config{.resolution = r, .center_crop = row["center_crop"]};
    const HostArray in = image_of(row["rgb"], row["height"], row["width"]);
    EXPECT_EQ(largest_difference(fit_image(in, config), image_of(row["out"], r, r)), 0);
  }
}

TEST(Resize, FlipMirrors) {
  const std::vector<uint8_t> pixels{0, 0, 0, 255, 255, 255, 51, 102, 204, 128, 128, 128};
  const HostArray in = HostArray::of<uint8_t>(Shape{DType::u8, {2, 2, 3}}, pixels);
  const HostArray flipped = fit_image(in, {.resolution = 2}, {.flip = true});
  const auto out = flipped.view<uint8_t>();
  EXPECT_EQ(std::vector(out.begin(), out.end()),
            (std::vector<uint8_t>{255, 255, 255, 0, 0, 0, 128, 128, 128, 51, 102, 204}));
}

TEST(ImageFolder, MetadataWinsOverTextFilesAndOrderIsByPath) {
  const Folder f("captions");
  const std::string png = file_of("rgb.png");
  f.put("b.png", png).put("a.png", png).put("sub/c.JPG", file_of("rgb.jpg")).put("d.webp", file_of("lossy.webp"));
  f.put("a.txt", "  from a text \n").put("b.txt", "loses").put(".hidden/x.png", png).put("notes.md", "none");
  f.put("metadata.jsonl",
        "{\"file_name\": \"b.png\", \"text\": \"a \\\"b\\\"\"}\n\n{\"file_name\": \"./d.webp\", \"text\": null, \"x\": "
        "1}\n");
  f.put("sub/metadata.jsonl", "{\"file_name\": \"c.JPG\", \"text\": [\"first\", \"second\"]}");
  std::string all;
  for (const ImageItem& i : list_image_folder(f.path, {}))
    all += fs::relative(i.file, f.path).string() + "=" + i.caption + ";";
  EXPECT_EQ(all, "a.png=from a text;b.png=a \"b\";d.webp=;sub/c.JPG=first;");
  EXPECT_EQ(list_image_folder(f.path, {.max_train_samples = 2}).size(), 2u);
}

TEST(ImageFolder, MetadataMayGiveBoxes) {
  Folder f("boxes");
  f.put("a.png", "x").put("b.png", "x");
  f.put("metadata.jsonl",
        "{\"file_name\": \"a.png\", \"text\": \"\", \"crop_box\": [1, 2, 3, 4]}\n"
        "{\"file_name\": \"b.png\", \"text\": \"\", \"crop_box\": null}");
  const std::vector<ImageItem> items = list_image_folder(f.path, {});
  ASSERT_TRUE(items[0].box.has_value());
  const CropBox& b = *items[0].box;
  EXPECT_EQ(std::vector({b.left, b.top, b.width, b.height}), (std::vector<int64_t>{1, 2, 3, 4}));
  EXPECT_FALSE(items[1].box.has_value());
  for (const char* bad : {"[1, 2, 3]", "[1, 2, 0, 4]", "[-1, 2, 3, 4]", "[1, 2.5, 3, 4]", "\"all\""}) {
    f.put("metadata.jsonl", fmt::format("{{\"file_name\": \"a.png\", \"text\": \"\", \"crop_box\": {}}}", bad));
    EXPECT_ERROR(list_image_folder(f.path, {}), "metadata.jsonl:1: crop_box is ");
  }
}

TEST(ImageFolder, ColumnsMayHaveOtherNames) {
  const Folder f("columns");
  f.put("a.png", file_of("rgb.png")).put("metadata.jsonl", R"({"picture": "a.png", "caption": "hello"})");
  EXPECT_EQ(list_image_folder(f.path, {.image_column = "picture", .caption_column = "caption"})[0].caption, "hello");
  EXPECT_ERROR(list_image_folder(f.path, {}),
               "metadata.jsonl:1: no column 'file_name'; the line has: caption, picture");
}

TEST(ImageFolder, BadFoldersAreRefusedWithTheReason) {
  EXPECT_ERROR(list_image_folder("/nowhere/pictures", {}), "'/nowhere/pictures': no such folder");
  EXPECT_ERROR(list_image_folder("/etc/passwd", {}), "not a folder");
  EXPECT_ERROR(list_image_folder(Folder("empty").path, {}), "no images");
  EXPECT_ERROR(list_image_folder(Folder("texts").put("a.txt", "x").path, {}), "captions without images");
  EXPECT_ERROR(list_image_folder(Folder("only_metadata").put("metadata.jsonl", "").path, {}), "names no images");
  const std::string png = file_of("rgb.png");
  const auto with = [&](const std::string& metadata) {
    return Folder("metadata").put("a.png", png).put("metadata.jsonl", metadata).path;
  };
  const std::string good = "{\"file_name\": \"a.png\", \"text\": \"x\"}\n";
  EXPECT_ERROR(list_image_folder(with(good + "{\"file_name\": \"lost.png\", \"text\": \"x\"}"), {}),
               "metadata.jsonl:2: names '");
  EXPECT_ERROR(list_image_folder(with(good + "not json"), {}), "metadata.jsonl:2: expected a JSON object");
  EXPECT_ERROR(list_image_folder(with(good + good), {}), "metadata.jsonl:2: names '");
  EXPECT_ERROR(list_image_folder(with("{\"file_name\": \"a.png\", \"text\": 7}"), {}), "'text' must be a string");
  EXPECT_ERROR(list_image_folder(with("{\"file_name\": 7, \"text\": \"x\"}"), {}), "'file_name' must be a string");
}

TEST(ImageFolder, ImagesThatDoNotDecodeAreSkippedAndNamed) {
  const Folder f("bad_pictures");
  const std::string png = file_of("rgb.png");
  f.put("1.png", png)
      .put("2.png", png.substr(0, 60))
      .put("3.jpg", "not an image")
      .put("4.png", file_of("rgb.jpg"))
      .put("5.png", "");
  for (int i : {1, 2, 3, 4, 5}) f.put(std::to_string(i) + ".txt", "caption " + std::to_string(i));
  const LoadedImages l = load(f.path, {.resolution = 8});
  EXPECT_EQ(l.captions, (std::vector<std::string>{"caption 1", "caption 4"}));
  EXPECT_EQ(l.pixels.dims(), (Dims{2, 8, 8, 3}));
  ASSERT_EQ(l.skipped.size(), 3u);
  EXPECT_NE(l.skipped[0].find("2.png: PNG: "), std::string::npos) << l.skipped[0];
  // The rows belong to the images that decoded.
  const HostArray fourth = fit_image(decode(file_of("rgb.jpg")), {.resolution = 8});
  EXPECT_EQ(std::memcmp(l.pixels.data() + fourth.bytes(), fourth.data(), fourth.bytes()), 0);

  const Folder all_bad("all_bad");
  all_bad.put("a.png", "x").put("b.png", "y");
  EXPECT_ERROR(load(all_bad.path, {.resolution = 8}), "none of 2 images can be decoded");
}

TEST(ImageFolder, FingerprintFollowsFilesAndCaptions) {
  const auto print = [](const Folder& f) {
    return open_source({.dataset_type = "image_folder", .train_data_dir = f.path})->fingerprint();
  };
  const std::string png = file_of("rgb.png");
  const Folder a("print_a");
  a.put("a.png", png).put("a.txt", "one");
  const std::string base = print(a);
  EXPECT_EQ(base, print(a));
  a.put("a.txt", "two");
  const std::string other_caption = print(a);
  EXPECT_NE(base, other_caption);
  a.put("a.png", file_of("grey.png"));
  EXPECT_NE(other_caption, print(a));
}

}  // namespace
}  // namespace md
