// Qwen-Image-Edit through the real program: which images it accepts, the size of samples, and errors.
#include "maxdiffusion/base/host_array_rows.h"
#include "maxdiffusion/data/folders/dataset_file.h"
#include "maxdiffusion/data/records/open_source.h"
#include "maxdiffusion/encoders/image_conditioner.h"
#include "maxdiffusion/families/family.h"
#include "maxdiffusion/run/encode_dataset.h"
#include "maxdiffusion/run/training_data.h"
#include "tests/one_device.h"
#include "tests/pipelines/family_program.h"

namespace md {
namespace {

namespace fs = std::filesystem;

struct QwenImageEdit : FamilyProgram {
  QwenImageEdit()
      : FamilyProgram({"qwen_image_edit", "qwenimage_edit/edit", "", {"true_cfg_scale=2", "reference_resolution=80"}}) {
  }

  const std::string plus = MD_SOURCE_DIR "/tests/golden/qwenimage_edit/plus";
  const std::string a = "image=" + image("a.png", 66, 81, 3), b = "image=" + image("b.png", 70, 64, 90),
                    both = a + "," + (t / "b.png");

  Dims sampled(const std::string& model, const Words& extra) {
    Words words = {"output_type=np", "height=null", "width=null", "num_inference_steps=1", "true_cfg_scale=1"};
    words.insert(words.end(), extra.begin(), extra.end());
    const Outcome o = generate(model, words);
    EXPECT_EQ(o.status, 0) << o.err;
    return SafetensorsReader::open(t / "images.safetensors").tensors().at("images").dims();
  }
};

TEST_F(QwenImageEdit, TakesOneImageOrSeveralAsThePipelineDoes) {
  expect_refused(generate(base, {}), 2, "image: empty; this model changes an image");
  expect_refused(generate(plus, {}), 2, "try: image=FILE");
  expect_refused(generate(base, {both}), 2, "image: 2 images are given; this model takes 1");
  std::string many = both;
  for (int i = 0; i < 9; ++i) many += "," + (t / "a.png");
  expect_refused(generate(plus, {many}), 2, "image: 11 images are given; this model takes up to 10");
  const std::vector<double> first = latents(plus, {a}), two = latents(plus, {both});
  EXPECT_NE(two, first);
  EXPECT_NE(latents(plus, {b + "," + (t / "a.png")}), two);
}

TEST_F(QwenImageEdit, SamplesAreAsLargeAsTheLastImageWhereNoKeySaysOtherwise) {
  EXPECT_EQ(sampled(base, {a}), (Dims{1, 64, 96, 3}));
  EXPECT_EQ(sampled(plus, {both}), (Dims{1, 96, 64, 3})) << "the last, nearly a square";
  EXPECT_EQ(sampled(base, {a, "reference_resolution=112"}), (Dims{1, 96, 128, 3}));
  EXPECT_EQ(sampled(base, {a, "width=32"}), (Dims{1, 64, 32, 3}));
}

// As computed by diffusers' calculate_dimensions and transformers' smart_resize.
TEST_F(QwenImageEdit, ImagesHaveTheSizesOfThePublishedPipelines) {
  const std::vector<MediaSize> image_sizes = {{1080, 1920}, {66, 81}};
  const auto sides = [](const MediaSize& size) { return Dims{size.height, size.width}; };
  const auto one = make_family(ModelFolder::open(base)), several = make_family(ModelFolder::open(plus));
  for (const auto& family : {one, several}) {
    EXPECT_EQ(sides(family->reference_images()->fitted(image_sizes[0]).cropped), (Dims{768, 1376}));
    EXPECT_EQ(sides(family->reference_images()->sample_size(image_sizes)), (Dims{928, 1120}));
    EXPECT_EQ(sides(family->reference_images()->fitted({3000, 20}).cropped), (Dims{12544, 96}));
  }
  ReferenceImages::Seen seen = one->seen({image_sizes[0]});
  EXPECT_EQ(sides(seen.sizes.at(0)), (Dims{756, 1372}));
  EXPECT_EQ(seen.tokens, 1 + 27 * 49 + 1);
  seen = several->seen(image_sizes);
  EXPECT_EQ(sides(seen.sizes.at(0)), (Dims{280, 504}));
  EXPECT_EQ(sides(seen.sizes.at(1)), (Dims{364, 420}));
  const size_t second = seen.text.find("<|vision_end|>Picture 2: <|vision_start|><|image_pad|>");
  EXPECT_TRUE(seen.text.starts_with("Picture 1: <|vision_start|><|image_pad|>") && second != std::string::npos)
      << seen.text;
}

TEST_F(QwenImageEdit, ThePromptIsReadWithTheImage) {
  // The image affects the text embeddings as well as the reference tokens.
  std::string log;
  const std::vector<double> plain = latents(base, {a, "true_cfg_scale=1"}, &log);
  EXPECT_FALSE(contains(log, "caption longer")) << log;
  EXPECT_NE(latents(base, {b, "true_cfg_scale=1"}), plain);
  EXPECT_NE(latents(base, {a, "true_cfg_scale=1", "prompt=blue"}), plain);
  std::string words;
  for (int i = 0; i < 1200; ++i) words += "7 ";
  latents(base, {a, "true_cfg_scale=1", "num_inference_steps=1", "prompt=" + words}, &log);
  EXPECT_TRUE(contains(log, "caption longer than 1024 tokens is cut")) << log;  // image tokens do not count
}

TEST_F(QwenImageEdit, ReplacesThePartOfOneImageThatAMaskShows) {
  HostArray columns(Shape{DType::u8, {64, 96, 3}});
  auto v = columns.mutable_view<uint8_t>();
  for (size_t i = 0; i < v.size(); ++i) v[i] = i / 3 % 96 < 48 ? 0 : 255;
  write_png(t / "mask.png", columns);
  const std::string mask = "mask_image=" + (t / "mask.png");
  const Words words = {a, mask, "height=null", "width=null", "true_cfg_scale=1"};
  Words other = words;
  other.emplace_back("prompt=blue");
  const std::vector<double> red = latents(base, words), blue = latents(base, other);  // [1, 16, 32, 48]
  ASSERT_EQ(red.size(), 16 * 32 * 48);
  for (size_t i = 0; i < red.size(); ++i) EXPECT_EQ(red[i] == blue[i], i % 48 < 24) << i;
  // At the size of the scaled image plus the margins, again scaled.
  EXPECT_EQ(sampled(base, {a, "outpaint=0,70,0,70", "strength=1"}), (Dims{1, 128, 64, 3}));
  expect_refused(generate(plus, {both, mask}), 2,
                 "image: 2 images are given with strength, mask_image or outpaint; this model then takes 1");
  expect_refused(generate(base, {mask}), 2, "is given without image; expected image=FILE too");
  expect_refused(generate(base, {a, "hires_scale=2"}), 2, "hires_scale is 2; expected 1: this model changes an image");
}

TEST_F(QwenImageEdit, AnImageIsEncodedOnceForAllTexts) {
  const OpenedModel model = open_model(plus, {}, {.purpose = Purpose::sampling});
  TextEncoder encoder(one_device(), model.family, 1,
                      [&](const ParamTable& params, const std::string& c) { return model.weights.read(params, c); }, {},
                      {});
  const HostArray first = decode_image(t / "a.png"), second = decode_image(t / "b.png");
  const auto encode = [&](const std::vector<std::string>& texts, const std::vector<HostArray>& images) {
    return encoder.encode(texts, {}, 0, 0, {images}).at("prompt_embeds").to_doubles();
  };
  const std::vector<double> red = encode({"red"}, {first, second});
  EXPECT_EQ(encoder.images_encoded(), 2);
  const std::vector<double> both = encode({"grey", "red"}, {first, second});
  EXPECT_EQ(encoder.images_encoded(), 2) << "a second text and a third";
  EXPECT_TRUE(std::equal(red.begin(), red.end(), both.begin() + std::ssize(both) / 2));
  EXPECT_NE(encode({"red"}, {second, first}), red);
  EXPECT_EQ(encoder.images_encoded(), 4) << "other images";
  encoder.forget_weights();
  EXPECT_NE(encode({"red"}, {second, first}), red);
  EXPECT_EQ(encoder.images_encoded(), 6) << "other weights";
}

TEST_F(QwenImageEdit, RefusesImagesThatItDoesNotTake) {
  expect_refused(generate(base, {"image=" + image("band.png", 2010, 10, 0)}), 2,
                 "image: a reference of 2010x10 pixels; expected a side at most 200 times as long as the other");
  std::string log;
  latents(base, {"image=" + image("dot.png", 1, 1, 0), "num_inference_steps=1"}, &log);
  EXPECT_TRUE(contains(log, "image: a reference of 1x1 pixels is enlarged to 64x64")) << log;
}

TEST_F(QwenImageEdit, RefusesFoldersWithoutWhatSeesImages) {
  const std::string model = copy(), index = model + "/model_index.json", encoder = model + "/text_encoder/config.json",
                    processor = model + "/processor/preprocessor_config.json";
  const std::string original = read_file(processor), config = read_file(encoder);
  change(processor, [](auto& j) { j["patch_size"] = 7; });
  expect_refused(generate(model, {a}), 2,
                 "processor: tokens of 14 pixels a side ('patch_size' times 'merge_size'); expected 28");
  change(processor, [](auto& j) {
    j.erase("merge_size");
    j["size"] = {{"height", 28}, {"width", 28}};
  });
  expect_refused(generate(model, {a}), 2, "it prepares images of one size");
  // Since transformers 5 a processor is saved as one file.
  const std::vector<double> wanted = latents(base, {a});
  write_file_atomic(model + "/processor/processor_config.json", R"({"image_processor": )" + original + "}");
  fs::remove(processor);
  EXPECT_EQ(latents(model, {a}), wanted);
  fs::remove_all(model + "/processor");
  expect_refused(generate(model, {a}), 2, "no processor/preprocessor_config.json; a QwenImageEditPipeline needs it");
  fs::copy(base + "/processor", model + "/processor");
  change(encoder, [](auto& j) { j["vision_config"]["out_hidden_size"] = 20; });
  expect_refused(generate(model, {a}), 2, "'vision_config' has 'out_hidden_size' 20; expected 'hidden_size' = 16");
  change(encoder, [](auto& j) { j.erase("vision_config"); });
  expect_refused(generate(model, {a}), 2, "no 'vision_config'; expected one: this model's text encoder sees images");
  write_file_atomic(encoder, config);
  const std::string weights = model + "/text_encoder/model.safetensors";
  HostArrays tensors = SafetensorsReader::open(base + "/text_encoder/model.safetensors").tensors();
  ASSERT_GT(std::erase_if(tensors, [](const auto& a) { return a.first.find("visual.") != std::string::npos; }), 0);
  write_safetensors(weights, tensors);
  expect_refused(generate(model, {a}), 4, "visual.");
}

/// Training on image pairs, for every family with reference images.
struct Row {
  FamilyFacts facts;
  std::string columns;  // as many as the model takes
};
void PrintTo(const Row& r, std::ostream* os) { *os << r.facts.name; }

struct Pairs : FamilyProgram, testing::WithParamInterface<Row> {
  Pairs() : FamilyProgram(GetParam().facts) { write_pairs("pairs", 0); }

  /// Writes images of one colour each, with sources of other sizes; `shade` changes the sources' colours.
  void write_pairs(const std::string& folder, int shade) {
    make_folders(t / folder);
    std::string rows;
    for (int i = 0; i < 4; ++i) {
      const bool wide = i % 2 == 1;
      HostArray plain(Shape{DType::u8, {32, wide ? 48 : 32, 3}});
      std::ranges::fill(plain.mutable_view<uint8_t>(), static_cast<uint8_t>(60 * i));
      write_png(t / fmt::format("{}/to{}.png", folder, i), plain);
      image(fmt::format("{}/from{}.png", folder, i), 40, wide ? 60 : 40, 90 + 7 * i + shade);
      if (contains(GetParam().columns, "pose")) image(fmt::format("{}/pose{}.png", folder, i), 32, 32, 20 * i);
      rows += fmt::format(
          R"({{"file_name": "to{0}.png", "source": "from{0}.png", "pose": "pose{0}.png", "text": "red {0}"}})"
          "\n",
          i);
    }
    write_file_atomic(t / folder + "/metadata.jsonl", rows);
  }
  Outcome train(const std::string& run_name, const std::string& folder, const Words& extra) {
    return run("train",
               {"run_name=" + run_name, "output_dir=" + t.path(), "pretrained_model_name_or_path=" + base,
                "train_data_dir=" + (t / folder), "cond_image_column=" + GetParam().columns, "resolution=32",
                "per_device_batch_size=2", "max_train_steps=4", "learning_rate=1e-3", "disable_training_weights=true"},
               extra);
  }
  std::string weights(const std::string& run_name, int step) {
    return read_file(t /
                     fmt::format("{}/checkpoints/{}/transformer/diffusion_pytorch_model.safetensors", run_name, step));
  }
};

TEST_P(Pairs, AreResumedToTheBitAndSampledWith) {
  Outcome o = train("a", "pairs", {"checkpoint_every=2"});
  ASSERT_EQ(o.status, 0) << o.err;
  EXPECT_TRUE(contains(o.err, "4 images, 0 skipped")) << o.err;  // sources are not counted as images
  const std::string whole = weights("a", 4);
  fs::remove_all(t / "a/checkpoints/4");
  ASSERT_EQ(train("a", "pairs", {"checkpoint_every=2"}).status, 0);
  EXPECT_EQ(weights("a", 4), whole);
  // Other sources give other weights.
  write_pairs("others", 40);
  ASSERT_EQ(train("b", "others", {}).status, 0);
  EXPECT_NE(weights("b", 4), whole);
  const std::string from = "image=" + image("a.png", 66, 81, 3);
  EXPECT_NE(latents(t / "a", {from}), latents(base, {from}));
}

TEST_P(Pairs, AreTrainedWithInBucketsAndMirrored) {
  Words words = {"enable_bucket=true", "bucket_reso_steps=8", "min_bucket_reso=16", "max_bucket_reso=64"};
  ASSERT_EQ(train("plain", "pairs", words).status, 0);
  words.emplace_back("random_flip=true");
  const Outcome o = train("a", "pairs", words);
  ASSERT_EQ(o.status, 0) << o.err;
  EXPECT_NE(weights("a", 4), weights("plain", 4));  // sources are mirrored; uniform images do not change
  EXPECT_TRUE(contains(o.err, "bucket 32x32: 2 images") && contains(o.err, "bucket 40x24: 2 images")) << o.err;
}

// Captions are encoded with their image's sources, as `generate` does; mirrored samples with mirrored sources.
TEST_P(Pairs, AreEncodedAsTheyAreSampledWith) {
  Words words = {"run_name=cached",
                 "output_dir=" + t.path(),
                 "pretrained_model_name_or_path=" + base,
                 "train_data_dir=" + (t / "pairs"),
                 "cond_image_column=" + GetParam().columns,
                 "resolution=32",
                 "random_flip=true"};
  words.insert(words.end(), facts.words.begin(), facts.words.end());
  const RunConfig c = RunConfig::load(MD_SOURCE_DIR "/tests/pipelines/generate.yml", words);
  const TrainingRequest r = training_request(c);
  ModelComponents models(r.components);
  const DataPlan data = plan_data(r.data, DataMode::cached_latents, r.run, *models.family());
  const auto source = open_source(prepare_source(data.source));
  const CachedImages cached = encode_dataset(models, data.cache, source, data.images);
  ASSERT_EQ(cached.images, 4);
  const LoadedImages loaded = load_images(source, data.images);
  ASSERT_FALSE(loaded.references.empty());
  const auto close = [](const HostArray& a, const HostArray& b) {
    const std::vector<double> x = a.to_doubles(), y = b.to_doubles();
    double most = x.size() == y.size() ? 0 : 1;
    for (size_t i = 0; i < x.size() && most == 0; ++i) most = std::abs(x[i] - y[i]) > 1e-5 ? 1 : 0;
    return most == 0;
  };
  for (int64_t i = 0; i < 4; ++i)
    for (const std::string prefix : {"", "mirrored."}) {
      const HostArrays found = cached.buckets[0]->read(i);
      std::vector<HostArray> images;
      for (const HostArray& place : loaded.references) {
        const HostArray one = row_of(prefix.empty() ? place : mirrored(place), i);
        const std::string field = ReferenceImages::field(images.size());
        const HostArray latents = models.media_autoencoder().latents(one.reshaped(batched(1, one.shape()).dims));
        EXPECT_TRUE(close(found.at(prefix + field), row_of(latents, 0))) << i;
        images.push_back(one);
      }
      const bool seen = models.family()->seen(ReferenceImages::sizes_of(images)).tokens > 0;
      const HostArrays expected =
          models.text_encoder().encode({loaded.captions[static_cast<size_t>(i)]}, {}, 0, 0, {images});
      for (const auto& [name, a] : expected)
        EXPECT_TRUE(close(found.at((seen ? prefix : "") + name), row_of(a, 0))) << prefix << name << i;
    }
}

TEST_P(Pairs, OfRecordsAreTrainedWithAsThoseOfAFolder) {
  const Words words = {"enable_data_shuffling=false", "eval_every=0"};
  ASSERT_EQ(train("folder", "pairs", words).status, 0);
  Words prepare = {"output_dir=" + t.path(),
                   "pretrained_model_name_or_path=" + base,
                   "train_data_dir=" + (t / "pairs"),
                   "cond_image_column=" + GetParam().columns,
                   "resolution=32",
                   "tfrecords_dir=" + (t / "records")};
  prepare.insert(prepare.begin(), {"prepare_tfrecords", MD_SOURCE_DIR "/tests/pipelines/generate.yml"});
  prepare.insert(prepare.end(), facts.words.begin(), facts.words.end());
  const Outcome prepared = maxdiffusion(prepare);
  ASSERT_EQ(prepared.status, 0) << prepared.err;
  Words records = words;
  records.emplace_back("dataset_type=tfrecord");
  const Outcome o = train("of_records", "records", records);
  ASSERT_EQ(o.status, 0) << o.err;
  const auto trained = [&](const std::string& run) {
    return SafetensorsReader::open(t / (run + "/checkpoints/4/transformer/diffusion_pytorch_model.safetensors"));
  };
  const SafetensorsReader folder = trained("folder"), found = trained("of_records");
  for (const auto& [name, a] : folder.tensors()) {
    const std::vector<double> x = a.to_doubles(), y = found.tensors().at(name).to_doubles();
    for (size_t i = 0; i < x.size(); ++i) ASSERT_NEAR(x[i], y[i], 1e-5) << name << " " << i;
  }
}

// ai-toolkit's list names a folder of control images for each reference image.
TEST_P(Pairs, OfADatasetFileAreThoseOfMetadata) {
  const bool posed = contains(GetParam().columns, "pose");
  for (int i = 0; i < 4; ++i)
    for (const char* part : {"to", "from", "pose"}) {
      make_folders(t / part);
      const std::string file = t / fmt::format("pairs/{}{}.png", part, i);
      if (fs::exists(file)) fs::copy(file, t / fmt::format("{}/{}.png", part, i));
      if (part == std::string("to")) write_file_atomic(t / fmt::format("to/{}.txt", i), fmt::format("red {}", i));
    }
  const auto write = [&](const std::string& name, const std::string& controls) {
    write_file_atomic(t / name, "datasets:\n- folder_path: to\n  resolution: 32\n  buckets: false\n" + controls);
  };
  const std::string pose = posed ? "  control_path_1: pose\n" : "";
  write("pairs.yml", "  control_path: from\n" + pose);
  const auto words = [&](const std::string& file) {
    return Words{"run_name=a",
                 "output_dir=" + t.path(),
                 "pretrained_model_name_or_path=" + base,
                 "dataset_config=" + (t / file),
                 "per_device_batch_size=2",
                 "max_train_steps=4",
                 "learning_rate=1e-3",
                 "disable_training_weights=true"};
  };
  const DataFolders found("x", read_dataset_file(t / "pairs.yml", "", {}).folders);
  const auto pairs = open_source(
      {.dataset_type = "image_folder", .train_data_dir = t / "pairs", .cond_image_column = GetParam().columns});
  ASSERT_EQ(found.size(), 4);
  for (int64_t i = 0; i < 4; ++i) {
    const Record ours = found.read(i), theirs = pairs->read(i);
    EXPECT_EQ(ours.image.bytes, theirs.image.bytes);
    EXPECT_EQ(ours.caption, theirs.caption);
    ASSERT_EQ(ours.references.size(), posed ? 2u : 1u);
    for (size_t k = 0; k < ours.references.size(); ++k)
      EXPECT_EQ(ours.references[k].bytes, theirs.references.at(k).bytes) << i << " " << k;
  }
  const Outcome o = run("train", words("pairs.yml"), {});
  ASSERT_EQ(o.status, 0) << o.err;
  const std::string first = weights("a", 4);
  for (int i = 0; i < 4; ++i) image(fmt::format("from/{}.png", i), 32, 32, 200 + i);
  fs::remove_all(t / "a");
  ASSERT_EQ(run("train", words("pairs.yml"), {}).status, 0);
  EXPECT_NE(weights("a", 4), first) << "other sources give other weights";
  write("none.yml", "");
  if (base.ends_with("edit"))
    expect_refused(run("train", words("none.yml"), {}), 2,
                   "none.yml:2: 0 control images for each image; expected 1 to 1");
  write("two.yml", "  control_path: from\n- folder_path: to\n");
  expect_refused(run("train", words("two.yml"), {}), 2, "0 control images for each image; expected 1, as in the first");
  fs::remove(t / "from/2.png");
  expect_refused(run("train", words("pairs.yml"), {}), 4, "1 of 4 images have no control image there");
}

TEST_P(Pairs, AreRefusedWhereTheyCannotBeTrainedWith) {
  expect_refused(train("a", "pairs", {"cond_image_column=mask"}), 4, "no column 'mask'");
  expect_refused(
      train("a", "pairs", {"cond_image_column=" + GetParam().columns, "cache_latents_text_encoder_outputs=false"}), 2,
      "cond_image_column cannot be combined with cache_latents_text_encoder_outputs=false");
  std::string many = "source";
  for (int i = 0; i < 10; ++i) many += ",source";
  expect_refused(train("a", "pairs", {"cond_image_column=" + many}), 2,
                 "cond_image_column names 11 columns; this model takes");
  fs::remove(t / "pairs/from1.png");
  expect_refused(train("a", "pairs", {}), 4, "from1.png");
}

INSTANTIATE_TEST_SUITE_P(
    Families, Pairs,
    testing::Values(Row{{"qwen_image_edit", "qwenimage_edit/edit", "", {"true_cfg_scale=2", "reference_resolution=64"}},
                        "source"},
                    Row{{"qwen_image_edit", "qwenimage_edit/plus", "", {"reference_resolution=64"}}, "source, pose"},
                    Row{{"flux2klein", "flux2/base", "", {"text_encoder_out_layers=[1,2,3]"}}, "source,pose"}),
    [](const auto& info) { return std::string(info.index == 1 ? "qwen_image_edit_plus" : info.param.facts.name); });

TEST_F(QwenImageEdit, TrainsWithReferenceImagesOnly) {
  const Words words = {
      "run_name=a",    "output_dir=" + t.path(), "pretrained_model_name_or_path=" + base, "train_data_dir=" + t.path(),
      "resolution=32", "max_train_steps=1"};
  expect_refused(run("train", words, {}), 2,
                 "cond_image_column is empty; expected the column of what an image is made from");
  expect_refused(run("train", words, {"cond_image_column=a,b"}), 2,
                 "cond_image_column names 2 columns; this model takes 1 reference images");
  expect_refused(run("train", words, {"cond_image_column=a", "caption_dropout=0.1"}), 2,
                 "caption_dropout is 0.1; expected 0: this model's texts hold reference images");
}

}  // namespace
}  // namespace md
