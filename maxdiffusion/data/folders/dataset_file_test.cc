#include "maxdiffusion/data/folders/dataset_file.h"

#include <gtest/gtest.h>

#include <map>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/base/files.h"
#include "maxdiffusion/base/temporary_folder.h"
#include "maxdiffusion/data/images/test_images.h"

namespace md {
namespace {

class DatasetFiles : public testing::Test {
 protected:
  std::string write(const std::string& name, const std::string& text) {
    write_file_atomic(t_ / name, text);
    return t_ / name;
  }
  /// Writes images 0.png … of 16×16 with captions "FOLDER 0" in files with this ending; "": no captions.
  std::string images(const std::string& folder, int n, const std::string& ending = ".txt") {
    make_folders(t_ / folder);
    for (int i = 0; i < n; ++i) {
      const std::string stem = t_ / fmt::format("{}/{}", folder, i);
      write_png(stem + ".png", smooth(16, 16, i));
      if (!ending.empty()) write_file_atomic(stem + ending, fmt::format("{} {}", folder, i));
    }
    return t_ / folder;
  }
  DatasetFile read(const std::string& name, const std::string& text, const std::string& classes = "") {
    return read_dataset_file(write(name, text), classes, {});
  }
  /// Message and notes of the error, without the folder.
  std::string refusal(const std::string& name, const std::string& text) {
    try {
      DataFolders(name, read(name, text).folders);
    } catch (const Error& e) {
      std::string what = e.what();
      for (size_t at; (at = what.find(t_.path() + "/")) != what.npos;) what.erase(at, t_.path().size() + 1);
      for (size_t at; (at = what.find("\n  ")) != what.npos;) what.erase(at + 1, 2);
      return what;
    }
    return "accepted";
  }
  /// Repeats of each image, by folder and name.
  static std::map<std::string, int64_t> times(const DataFolders& all) {
    std::map<std::string, int64_t> out;
    for (int64_t i = 0; i < all.size(); ++i) {
      const std::string name = all.read(i).name;
      out[name.substr(name.rfind('/', name.rfind('/') - 1) + 1)] = all.repeats(i);
    }
    return out;
  }
  TemporaryFolder t_;
};

TEST_F(DatasetFiles, OfKohyaGiveInnerValuesBeforeOuterOnes) {
  images("a", 1), images("b", 1), images("c", 1);
  // The example from sd-scripts' documentation, with its remaining keys.
  const DatasetFile file = read("kohya.toml", R"([general]
shuffle_caption = true
caption_extension = 'txt'
keep_tokens = 1
flip_aug = true

[[datasets]]
resolution = 512
batch_size = 4
keep_tokens = 2
enable_bucket = true
bucket_no_upscale = true
bucket_reso_steps = 32
min_bucket_reso = 128
max_bucket_reso = 768
skip_image_resolution = [100, 50]

  [[datasets.subsets]]
  image_dir = 'a'
  class_tokens = 'hoge girl'
  num_repeats = 10
  caption_dropout_rate = 0.25
  caption_tag_dropout_rate = 0.5
  enable_wildcard = true
  caption_prefix = "best"
  caption_suffix = "from side"
  caption_separator = ";"
  keep_tokens_separator = "|||"
  secondary_separator = ";;;"

  [[datasets.subsets]]
  image_dir = 'b'
  keep_tokens = 3
  random_crop = true
  alpha_mask = true
  color_aug = false

[[datasets]]
resolution = [768, 640]
  [[datasets.subsets]]
  is_reg = true
  image_dir = 'c'
  flip_aug = false
)");
  ASSERT_EQ(file.folders.size(), 3u);
  EXPECT_EQ(file.batch_sizes, std::vector<int64_t>{4});
  const DataFolder &a = file.folders[0], &b = file.folders[1], &c = file.folders[2];
  EXPECT_EQ(a.folder, t_ / "a");
  EXPECT_TRUE(a.where.ends_with("kohya.toml:19")) << a.where;
  EXPECT_EQ(a.repeats, 10);
  EXPECT_EQ(a.missing_caption, "hoge girl");
  EXPECT_EQ(a.caption_extensions, std::vector<std::string>{".txt"});
  EXPECT_EQ(a.images.size, (ImageSize{512, 512}));
  EXPECT_TRUE(a.images.enable_bucket && a.images.bucket_no_upscale && a.images.random_flip);
  EXPECT_EQ(a.images.bucket_reso_steps, 32);
  EXPECT_EQ(a.images.min_bucket_reso, 128);
  EXPECT_EQ(a.images.max_bucket_reso, 768);
  EXPECT_EQ(a.images.least_area, 5001);  // 5000 is skipped too
  const CaptionRules& rules = a.captions;
  EXPECT_TRUE(rules.shuffle && rules.wildcards && rules.lines == CaptionRules::Lines::any);
  EXPECT_EQ(rules.keep_tokens, 2);
  EXPECT_EQ(rules.dropout, 0.25);
  EXPECT_EQ(rules.tag_dropout, 0.5);
  EXPECT_EQ(rules.prefix + rules.suffix + rules.separator + rules.keep_separator + rules.secondary_separator,
            "bestfrom side;|||;;;");
  EXPECT_EQ(b.repeats, 1);
  EXPECT_EQ(b.captions.keep_tokens, 3);
  EXPECT_TRUE(b.images.random_crop && b.images.alpha_mask && !a.images.random_crop && !a.images.alpha_mask);
  EXPECT_FALSE(b.missing_caption.has_value());
  EXPECT_EQ(b.captions.lines, CaptionRules::Lines::first);
  EXPECT_EQ(c.images.size, (ImageSize{640, 768}));
  EXPECT_TRUE(c.regularization && !c.images.random_flip && !c.images.enable_bucket);
  EXPECT_EQ(c.captions.keep_tokens, 1);
  EXPECT_EQ(a.group, b.group);
  EXPECT_NE(a.group, c.group);
}

TEST_F(DatasetFiles, OfKohyaRepeatImagesAndBalanceThoseOfTheClass) {
  images("a", 2), images("b", 3, ".caption"), images("c", 4);
  make_folders(t_ / "b/below");
  write_png(t_ / "b/below/x.png", smooth(8, 8));  // kohya does not read subfolders
  const std::string text = R"([[datasets]]
  [[datasets.subsets]]
  image_dir = 'a'
  num_repeats = 3
  [[datasets.subsets]]
  image_dir = 'b'
  [[datasets.subsets]]
  image_dir = 'c'
  is_reg = true
)";
  const DataFolders all("it", read("kohya.toml", text).folders);
  // 2·3 + 3 = 9 samples; class images come once each, then in turn: 9 = 3 + 2 + 2 + 2.
  EXPECT_EQ(times(all), (std::map<std::string, int64_t>{{"a/0.png", 3},
                                                        {"a/1.png", 3},
                                                        {"b/0.png", 1},
                                                        {"b/1.png", 1},
                                                        {"b/2.png", 1},
                                                        {"c/0.png", 3},
                                                        {"c/1.png", 2},
                                                        {"c/2.png", 2},
                                                        {"c/3.png", 2}}));
  EXPECT_EQ(all.caption(2), "b 0");
  EXPECT_EQ(all.read(8).folder, 2);
  // More class images than needed: only the first ones.
  const DataFolders few("it", read("kohya.toml", text + "  num_repeats = 4\n").folders);
  EXPECT_EQ(few.size(), 8);  // 4 + 4 + 4 ≥ 9
  EXPECT_EQ(times(few)["c/2.png"], 4);
  EXPECT_FALSE(times(few).contains("c/3.png"));
}

TEST_F(DatasetFiles, CaptionsComeFromFilesElseFromTheClass) {
  images("a", 2, "");
  write_file_atomic(t_ / "a/1.txt", "one\nsecond line\n");
  const std::string text = "[[datasets]]\n[[datasets.subsets]]\nimage_dir='a'\n";
  EXPECT_EQ(refusal("k.toml", text), "a/0.png: no caption; expected a .caption or .txt file next to it\nin k.toml:3");
  const DataFolders all("it", read("k.toml", text + "class_tokens='sks girl'\n").folders);
  EXPECT_EQ(all.caption(0), "sks girl");
  EXPECT_EQ(applied(all.folders()[0].captions, all.caption(1), 0, ""), "one");
  EXPECT_FALSE(all.captions_vary());
  EXPECT_TRUE(
      DataFolders("it", read("k.toml", text + "class_tokens='x'\nenable_wildcard=true\n").folders).captions_vary());
}

TEST_F(DatasetFiles, CountWhatTheyGiveImagesWithoutCaption) {
  images("train/2_cat", 3, "");
  write_png(t_ / "train/2_cat/0.bmp.png", smooth(8, 8));
  write("train/2_cat/1.txt", "mine");
  testing::internal::CaptureStderr();
  const DatasetFile file = read_dataset_file(t_ / "train", "", {});
  const DataFolders all(file.name, file.folders);
  const std::string log = testing::internal::GetCapturedStderr();
  std::vector<std::string> captions;
  for (int64_t i = 0; i < all.size(); ++i) captions.push_back(all.caption(i));
  EXPECT_EQ(captions, (std::vector<std::string>{"cat", "cat", "mine", "cat"}));
  EXPECT_NE(log.find("3 of 4 images have no caption (.caption or .txt): they train with 'cat'"), std::string::npos)
      << log;
}

TEST_F(DatasetFiles, OfKohyaReadItsMetadata) {
  images("a", 3, "");
  write("meta.json", R"({"0.png": {"caption": "a frog\nit", "tags": "green, sea"}, "2": {"tags": "t"}})");
  const DataFolders all(
      "it", read("k.toml", "[[datasets]]\n[[datasets.subsets]]\nimage_dir='a'\nmetadata_file='meta.json'\n").folders);
  ASSERT_EQ(all.size(), 2);
  EXPECT_EQ(all.caption(0), "a frog,green, sea\nit,green, sea");  // caption_separator, without a blank
  EXPECT_EQ(all.caption(1), "t");
  const DataFolders joined("it", read("k.toml",
                                      "[[datasets]]\n[[datasets.subsets]]\nimage_dir='a'\nmetadata_file='meta.json'\n"
                                      "caption_separator='; '\n")
                                     .folders);
  EXPECT_EQ(joined.caption(0), "a frog; green, sea\nit; green, sea");
}

TEST_F(DatasetFiles, CountWhatMetadataDoesNotName) {
  images("a", 3, "");
  write("meta.json", R"({"0.png": {"caption": "x"}, "7.png": {"tags": "t"}, "8": {"tags": "t"}})");
  testing::internal::CaptureStderr();
  const DataFolders all(
      "it", read("k.toml", "[[datasets]]\n[[datasets.subsets]]\nimage_dir='a'\nmetadata_file='meta.json'\n").folders);
  const std::string log = testing::internal::GetCapturedStderr();
  EXPECT_EQ(all.size(), 1);
  EXPECT_NE(log.find("2 images of '" + (t_ / "a") + "' are not named, and left out"), std::string::npos) << log;
  EXPECT_NE(log.find("2 of 3 names are of no image of '" + (t_ / "a") + "', the first is '7.png'"), std::string::npos)
      << log;
}

TEST_F(DatasetFiles, MayBeKohyasFolders) {
  images("train/10_sks dog", 1, ""), images("train/2_x_y", 2), images("train/plain", 1), images("reg/1_dog", 5, "");
  const DatasetFile file = read_dataset_file(t_ / "train", t_ / "reg", {});
  const DataFolders all(file.name, file.folders);
  EXPECT_EQ(times(all), (std::map<std::string, int64_t>{{"10_sks dog/0.png", 10},
                                                        {"2_x_y/0.png", 2},
                                                        {"2_x_y/1.png", 2},
                                                        {"1_dog/0.png", 3},
                                                        {"1_dog/1.png", 3},
                                                        {"1_dog/2.png", 3},
                                                        {"1_dog/3.png", 3},
                                                        {"1_dog/4.png", 2}}));
  EXPECT_EQ(all.caption(0), "sks dog");
  EXPECT_EQ(all.caption(1), "train/2_x_y 0");
  EXPECT_EQ(all.caption(3), "dog");
  images("zero/0_x", 1);
  EXPECT_THROW(read_dataset_file(t_ / "zero", "", {}), Error);
  EXPECT_THROW(read_dataset_file(t_ / "train/plain", "", {}), Error);
}

TEST_F(DatasetFiles, OfMusubi) {
  images("a", 2);
  write("lines.jsonl", "{\"image_path\": \"a/1.png\", \"caption\": \"one\"}\n\n");
  const DatasetFile file = read("musubi.toml", R"([general]
resolution = [960, 544]
batch_size = 2
enable_bucket = true
[[datasets]]
image_directory = "a"
caption_extension = ".txt"
cache_directory = "cache"
num_repeats = 3
[[datasets]]
image_jsonl_file = "lines.jsonl"
resolution = 256
bucket_no_upscale = true
)");
  const DataFolders all(file.name, file.folders);
  ASSERT_EQ(all.size(), 3);
  EXPECT_EQ(all.repeats(0), 3);
  EXPECT_EQ(all.caption(2), "one");
  EXPECT_EQ(file.folders[0].images.size, (ImageSize{544, 960}));
  EXPECT_TRUE(file.folders[0].images.enable_bucket);
  EXPECT_EQ(file.folders[1].images.size, (ImageSize{256, 256}));
  EXPECT_TRUE(file.folders[1].images.bucket_no_upscale);
  EXPECT_EQ(read("v.toml", "[[datasets]]\nimage_directory='a'\ncontrol_directory='b'\n").folders[0].references,
            std::vector<std::string>{"b"});
  EXPECT_EQ(refusal("v.toml", "[[datasets]]\nimage_directory='a'\nmultiple_target=true\n").substr(0, 43),
            "v.toml:3: multiple_target is true; expected");
}

TEST_F(DatasetFiles, OfMusubiNameControlImagesInLines) {
  images("a", 2), images("b", 4, "");
  const auto lines = [&](const std::string& first, const std::string& second) {
    write("lines.jsonl", "{\"image_path\": \"a/0.png\", \"caption\": \"0\"" + first +
                             "}\n{\"image_path\": \"a/1.png\", \"caption\": \"1\"" + second + "}\n");
    return read("m.toml", "[[datasets]]\nimage_jsonl_file='lines.jsonl'\n");
  };
  const DatasetFile one = lines(R"(, "control_path": "b/3.png")", R"(, "control_path": "b/2.png")");
  EXPECT_EQ(one.folders[0].reference_images(), 1);
  const DataFolders all("it", one.folders);
  ASSERT_EQ(all.read(0).references.size(), 1u);
  EXPECT_EQ(all.read(0).references[0].bytes, read_file(t_ / "b/3.png"));
  EXPECT_EQ(all.read(1).references[0].bytes, read_file(t_ / "b/2.png"));
  const DatasetFile two = lines(R"(, "control_path_0": "b/0.png", "control_path_1": "b/1.png")",
                                R"(, "control_path_1": "b/2.png", "control_path_0": "b/3.png")");
  EXPECT_EQ(two.folders[0].reference_images(), 2);
  EXPECT_EQ(DataFolders("it", two.folders).read(1).references[0].bytes, read_file(t_ / "b/3.png"));
  EXPECT_EQ(DataFolders("it", two.folders).read(1).references[1].bytes, read_file(t_ / "b/2.png"));
  const auto error = [&](const std::string& first, const std::string& second) {
    try {
      DataFolders("it", lines(first, second).folders);
    } catch (const Error& e) {
      return e.message();
    }
    return std::string("accepted");
  };
  EXPECT_TRUE(error(R"(, "control_path": "b/3.png")", "")
                  .ends_with("lines.jsonl:2: 0 control images; expected 1, as in the first line"));
  EXPECT_TRUE(error(R"(, "control_path": "b/9.png")", "").ends_with("b/9.png', which is no file"));
  testing::internal::CaptureStderr();
  EXPECT_EQ(error(R"(, "teacher_caption": "x")", ""), "accepted");
  const std::string log = testing::internal::GetCapturedStderr();
  EXPECT_NE(log.find("lines.jsonl: 'teacher_caption' of 1 line is not read"), std::string::npos) << log;
  write("v.jsonl", R"({"video_path": "a/0.png", "caption": "", "control_path": "a/1.png"})");
  EXPECT_EQ(refusal("v.toml", "[[datasets]]\nvideo_jsonl_file='v.jsonl'\n").substr(0, 54),
            "v.jsonl:1: 1 control images; expected 0, of a video\nin");
}

TEST_F(DatasetFiles, OfMusubiMayNameFoldersOfFrames) {
  images("clip", 11, "");
  write("v.jsonl", R"({"video_path": "clip", "caption": "eleven"})");
  const DataFolders all("it", read("v.toml", "[[datasets]]\nvideo_jsonl_file='v.jsonl'\ntarget_frames=[9]\n").folders);
  const Record r = all.read(0);
  EXPECT_EQ(r.caption, "eleven");
  ASSERT_EQ(r.frames.size(), 11u);
  EXPECT_EQ(r.frames[10].bytes, read_file(t_ / "clip/10.png"));  // after 9.png
  make_folders(t_ / "empty");
  write("v.jsonl", R"({"video_path": "empty", "caption": ""})");
  EXPECT_EQ(refusal("v.toml", "[[datasets]]\nvideo_jsonl_file='v.jsonl'\n").substr(0, 61),
            "v.jsonl:1: names 'empty', a folder without png or jpeg frames");
}

TEST_F(DatasetFiles, OfMusubiTakeSamplesOfClips) {
  using Sample = std::pair<std::vector<int64_t>, double>;  // frames, start
  const auto samples = [&](const std::string& keys) {
    std::vector<Sample> out;
    for (const DataFolder& f : read("v.toml", "[[datasets]]\nvideo_directory='a'\n" + keys).folders) {
      EXPECT_TRUE(f.clips);
      out.emplace_back(f.images.frames, f.images.start);
    }
    return out;
  };
  using Samples = std::vector<Sample>;
  EXPECT_EQ(samples(""), (Samples{{{}, 0}}));
  EXPECT_EQ(samples("target_frames=[9,1,9]\n"), (Samples{{{1}, 0}, {{9}, 0}}));
  EXPECT_EQ(samples("target_frames=[1,25]\nframe_extraction='head'\n"), (Samples{{{1}, 0}, {{25}, 0}}));
  EXPECT_EQ(samples("target_frames=[5]\nframe_extraction='uniform'\n"), (Samples{{{5}, 0}}));
  EXPECT_EQ(samples("target_frames=[1,5]\nframe_extraction='uniform'\nframe_sample=3\n"),
            (Samples{{{1}, 0}, {{1}, 0.5}, {{1}, 1}, {{5}, 0}, {{5}, 0.5}, {{5}, 1}}));
  EXPECT_EQ(samples("frame_extraction='full'\nmax_frames=16\n"), (Samples{{{1, 5, 9, 13}, 0}}));
  testing::internal::CaptureStderr();
  EXPECT_EQ(samples("target_frames=[24,21,4]\n"), (Samples{{{1}, 0}, {{21}, 0}}));
  const std::string log = testing::internal::GetCapturedStderr();
  EXPECT_NE(log.find("target_frames 24 is cut to 21, 1 plus a multiple of 4"), std::string::npos) << log;
  for (const char* how : {"chunk", "slide"})
    EXPECT_EQ(refusal("v.toml", fmt::format("[[datasets]]\nvideo_directory='a'\nframe_extraction='{}'\n", how)),
              fmt::format("v.toml:3: frame_extraction is '{}'; expected one of: head, uniform, full", how));
  EXPECT_EQ(refusal("v.toml", "[[datasets]]\nvideo_directory='a'\nframe_extraction='uniform'\n"),
            "v.toml:3: target_frames is missing; expected it with frame_extraction=uniform");
  EXPECT_EQ(refusal("v.toml", "[[datasets]]\nimage_directory='a'\ntarget_frames=[9]\n"),
            "v.toml:3: target_frames is given; expected videos");
}

TEST_F(DatasetFiles, OfMusubiMayHoldVideosAndImages) {
  const DatasetFile file = read("v.toml",
                                "[general]\ntarget_frames=[1,9]\n[[datasets]]\nvideo_directory='a'\n"
                                "[[datasets]]\nimage_directory='b'\n");
  ASSERT_EQ(file.folders.size(), 3u);
  EXPECT_TRUE(file.folders[0].clips && file.folders[1].clips && !file.folders[2].clips);
  EXPECT_EQ(file.folders[1].images.frames, std::vector<int64_t>{9});
  EXPECT_TRUE(file.folders[2].images.frames.empty());
}

TEST_F(DatasetFiles, OfSimpleTuner) {
  images("a/below", 2);
  const DatasetFile file = read("backends.json", R"([
	{"id": "x", "type": "local", "instance_data_dir": "a", "resolution": 1024, "resolution_type": "pixel_area",
	 "crop": false, "minimum_image_size": 10, "minimum_aspect_ratio": 0.5, "maximum_aspect_ratio": 3.0,
	 "caption_strategy": "textfile", "prepend_instance_prompt": true, "instance_prompt": "photo of",
	 "repeats": 4, "max_num_samples": 1, "cache_dir_vae": "cache",
	 "caption_shuffle": {"enable": true, "count": 3, "position_start": 1}},
	{"id": "y", "instance_data_dir": "a", "resolution": 0.25, "resolution_type": "area", "crop_style": "random",
	 "crop_aspect": "square", "caption_strategy": "instanceprompt", "instance_prompt": "a dog"},
	{"id": "z", "disabled": true, "whatever": 1},
	{"id": "t", "dataset_type": "text_embeds", "default": true}
])");
  ASSERT_EQ(file.folders.size(), 2u);
  const DataFolder &x = file.folders[0], &y = file.folders[1];
  EXPECT_EQ(x.repeats, 5);  // SimpleTuner counts from 0
  EXPECT_EQ(x.images.size, (ImageSize{1024, 1024}));
  EXPECT_TRUE(x.images.enable_bucket && x.recursive && x.captions.shuffle);
  EXPECT_EQ(x.images.least_area, 100);
  EXPECT_EQ(x.images.least_aspect, 0.5);
  EXPECT_EQ(x.images.greatest_aspect, 3);
  EXPECT_EQ(x.captions.keep_tokens, 1);
  EXPECT_EQ(x.captions.prefix, "photo of");
  EXPECT_EQ(y.images.size, (ImageSize{500, 500}));
  EXPECT_TRUE(!y.images.enable_bucket && y.images.random_crop);
  const DataFolders all(file.name, file.folders);
  ASSERT_EQ(all.size(), 3);
  EXPECT_EQ(all.caption(0), "a/below 0");
  EXPECT_EQ(all.caption(2), "a dog");
  EXPECT_EQ(refusal("b.json", "[\n{\"id\": \"x\",\n\"instance_data_dir\": \"a\",\n\"probability\": 0.5}]"),
            "b.json:4: probability is 0.5; expected none or 1: folders are weighed by repeats");
  EXPECT_EQ(refusal("b.json", "[\n{\"id\": \"x\",\n\"instance_data_dir\": \"a\",\n\"crop\": \"yes\"}]"),
            "b.json:4: crop is 'yes'; expected true or false");
  EXPECT_EQ(refusal("b.json", "[\n{\"id\": \"x\",\n]").substr(0, 24), "b.json:3: expected JSON:");
  EXPECT_EQ(refusal("b.json", "[{\"repeats\": 1e999}]").substr(0, 22), "b.json: expected JSON:");
  EXPECT_EQ(refusal("c.yml", "datasets:\n- folder_path: &a [*a]\n"),
            "c.yml:2: expected YAML: an alias refers to a node that contains it");
}

TEST_F(DatasetFiles, OfAiToolkit) {
  images("a", 2);
  const std::string text = R"(job: extension
config:
  name: it
  process:
    - type: sd_trainer
      trigger_word: p3r5on
      datasets:
        - folder_path: a
          caption_ext: txt
          caption_dropout_rate: 0.05
          shuffle_tokens: true
          cache_latents_to_disk: true
          loss_multiplier: 0.5
          num_repeats: 2
          flip_x: true
          mask_min_value: 0.1
          resolution: [512, 768]
)";
  const DatasetFile file = read("it.yaml", text);
  ASSERT_EQ(file.folders.size(), 2u);  // one per resolution
  const DataFolder& f = file.folders[1];
  EXPECT_EQ(f.images.size, (ImageSize{768, 768}));
  EXPECT_TRUE(f.images.enable_bucket && f.images.bucket_no_upscale && f.images.random_flip && f.captions.shuffle);
  EXPECT_EQ(f.captions.trigger, "p3r5on");
  EXPECT_EQ(f.captions.dropout, 0.05);
  EXPECT_EQ(f.loss_weight, 0.5);
  EXPECT_EQ(f.repeats, 2);
  EXPECT_EQ(f.images.unmasked_weight, 0.1);
  EXPECT_EQ(refusal("it.yaml", text + "          flip_y: true\n"),
            "it.yaml:18: flip_y is true; expected none: images are mirrored left to right only");
  EXPECT_EQ(refusal("it.yaml", text + "          flop_x: true\n"), "it.yaml:18: unknown key 'flop_x'\ntry: flip_x");
  EXPECT_EQ(read("l.yaml", "datasets:\n- {folder_path: a, buckets: false}\n").folders.size(), 1u);
}

TEST_F(DatasetFiles, ThatAreWrongAreRefusedByLine) {
  images("a", 1);
  const std::string head = "[[datasets]]\n[[datasets.subsets]]\nimage_dir = 'a'\n";
  const auto kohya = [&](const std::string& rest) { return refusal("k.toml", head + rest); };
  EXPECT_EQ(kohya(""), "accepted");
  EXPECT_EQ(
      kohya("[[[[ = false"),
      "k.toml:4: expected TOML: Error while parsing key: expected bare key starting character or string delimiter, saw "
      "'['");
  std::string dotted = "a";
  for (int i = 0; i < 100'000; ++i) dotted += ".a";
  for (const std::string& deep : {dotted + " = 1", "[" + dotted + "]\n", "x = {" + dotted + " = 1}"})
    EXPECT_EQ(kohya(deep), "k.toml:4: a key has more than 128 names joined by dots; expected fewer");
  EXPECT_TRUE(kohya("x = " + std::string(100'000, '[')).starts_with("k.toml:4: expected TOML: "));
  EXPECT_EQ(kohya("num_repeats = 0"), "k.toml:4: num_repeats is 0; expected a whole number, 1 or more");
  EXPECT_EQ(kohya("num_repeats = 1.5"), "k.toml:4: num_repeats is 1.5; expected a whole number, 1 or more");
  EXPECT_EQ(kohya("num_repeat = 2"), "k.toml:4: unknown key 'num_repeat'\ntry: num_repeats");
  EXPECT_EQ(kohya("shuffle_caption = 1"), "k.toml:4: shuffle_caption is 1; expected true or false");
  EXPECT_EQ(kohya("caption_dropout_rate = 1.1"),
            "k.toml:4: caption_dropout_rate is 1.1; expected a number from 0 to 1");
  EXPECT_EQ(kohya("color_aug = true"), "k.toml:4: color_aug is true; expected none: colours are not changed");
  EXPECT_EQ(kohya("resolution = 512"),
            "k.toml:4: resolution is a key of [general] and [[datasets]]; found it in [[datasets.subsets]]");
  EXPECT_EQ(kohya("flip_aug = "),
            "k.toml:4: expected TOML: Error while parsing key-value pair: encountered end-of-file");
  EXPECT_EQ(refusal("k.toml", "[general]\nflip_oug = true\n" + head),
            "k.toml:2: unknown key 'flip_oug'\ntry: flip_aug");
  EXPECT_EQ(refusal("k.toml", "[generel]\n" + head),
            "k.toml:1: unknown key 'generel'; expected [general] and [[datasets]]");
  EXPECT_EQ(refusal("k.toml", "[[datasets]]\n[[datasets.subsets]]\nimage_dir = 'nowhere'\n").substr(0, 39),
            "image folder 'nowhere': no such folder\n");
  EXPECT_EQ(kohya("is_reg = true"),
            "k.toml:3: regularization images alone; expected a folder of other images next to them");
  EXPECT_EQ(kohya("conditioning_data_dir = 'a/b'").substr(0, 46), "conditioning_data_dir 'a/b': no such folder\ntr");
  EXPECT_EQ(refusal("k.toml", "x = 1\n").substr(0, 50), "dataset_config: 'k.toml' describes no dataset\ntry:");
  EXPECT_THROW(read_dataset_file(t_ / "none.toml", "", {}), Error);
  EXPECT_THROW(read_dataset_file(write("a.txt", ""), "", {}), Error);
  // As in kohya's trainer, the same folder twice in a data set counts once.
  EXPECT_EQ(read("k.toml", head + "[[datasets.subsets]]\nimage_dir='a'\n").folders.size(), 1u);
}

}  // namespace
}  // namespace md
