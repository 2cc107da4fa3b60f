// Prompts chosen by each image's seed, prompts from a file, and LoRA tags.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <regex>
#include <set>

#include "maxdiffusion/media/decode_image.h"
#include "maxdiffusion/media/image.h"
#include "tests/cli/command.h"

namespace md {
namespace {

namespace fs = std::filesystem;
const std::string kModel = MD_SOURCE_DIR "/tests/golden/pipelines/sd",
                  kQuick = "xla_flags=--xla_backend_optimization_level=0";  // as in generate.yml

class Prompts : public testing::Test {
 protected:
  Outcome sample(std::vector<std::string> words) {
    words.insert(words.begin(),
                 {command, MD_SOURCE_DIR "/tests/pipelines/generate.yml", "pretrained_model_name_or_path=" + model,
                  "output_dir=" + (t / "out"), "output_type=png", "num_inference_steps=2", "height=16", "width=16"});
    fs::remove_all(t / "out");
    return maxdiffusion(words);
  }
  Outcome sample_lines(const std::string& lines, std::vector<std::string> words = {}) {
    write_file_atomic(t / "lines.txt", lines);
    words.push_back("prompt_file=" + (t / "lines.txt"));
    return sample(words);
  }
  std::string image(int i) { return t / fmt::format("out/{}_{}.png", prefix, i); }
  /// "prompt|negative prompt|steps|CFG scale|seed|size".
  std::string text_of(int i) {
    const std::string bytes = read_file(image(i));
    const std::string text =
        png_texts({reinterpret_cast<const uint8_t*>(bytes.data()), bytes.size()}, image(i)).at("parameters");
    static const std::regex form(
        "([^\n]*)(?:\nNegative prompt: ([^\n]*))?\nSteps: (\\d+), .*CFG scale: ([^,]*), Seed: (\\d+), Size: (\\w+),.*");
    std::smatch m;
    EXPECT_TRUE(std::regex_match(text, m, form)) << text;
    std::string out = m[1];
    for (size_t k = 2; k < m.size(); ++k) out += "|" + m[k].str();
    return out;
  }
  /// Reproduces an image of sample() from the settings in its file.
  std::string again(int i) {
    fs::remove_all(t / "again");
    const Outcome o = maxdiffusion({"generate", image(i), kQuick, "output_dir=" + (t / "again")});
    EXPECT_EQ(o.status, 0) << o.err;
    return read_file(t / ("again/" + prefix + "_0.png"));
  }
  TemporaryFolder t;
  std::string model = kModel, prefix = "image", command = "generate";
};

TEST_F(Prompts, AreChosenByEachImagesSeedAndAreWhatImagesCarry) {
  make_folders(t / "w");
  write_file_atomic(t / "w/what.txt", "heart\nstar\n");
  const std::vector<std::string> words = {"prompt=[\"a {red|blue} __what__\", \"{x|y|z}\"]",
                                          "dynamic_prompts=true",
                                          "negative_prompt={grey|dull}",
                                          "num_images_per_prompt=4",
                                          "wildcards_dir=" + (t / "w"),
                                          "sample_seed=3"};
  ASSERT_EQ(sample(words).status, 0);
  std::vector<std::string> texts, bytes;
  std::set<std::string> prompts, negatives;
  const std::regex form("(?:a (?:red|blue) (?:heart|star)|([xyz]))\\|(grey|dull)\\|2\\|7.5\\|3\\|16x16");
  for (int i = 0; i < 8; ++i) {
    texts.push_back(text_of(i)), bytes.push_back(read_file(image(i)));
    std::smatch m;
    ASSERT_TRUE(std::regex_match(texts.back(), m, form)) << texts.back();
    EXPECT_EQ(m[1].matched, i >= 4) << i;
    prompts.insert(texts.back().substr(0, texts.back().find('|')));
    negatives.insert(m[2]);
  }
  EXPECT_GT(prompts.size(), 3u);
  EXPECT_EQ(negatives.size(), 2u);
  // Works without the wildcard folder, which the image does not refer to.
  fs::rename(t / "w", t / "moved");
  for (int i : {5, 0}) EXPECT_EQ(again(i), bytes[static_cast<size_t>(i)]) << i;
  fs::rename(t / "moved", t / "w");
  ASSERT_EQ(sample(words).status, 0);
  for (int i = 0; i < 8; ++i) EXPECT_EQ(read_file(image(i)), bytes[static_cast<size_t>(i)]) << i;

  ASSERT_EQ(sample({"prompt={red|blue}"}).status, 0);
  EXPECT_TRUE(text_of(0).starts_with("{red|blue}||")) << text_of(0);
  Outcome o = sample({"prompt=red", "dynamic_prompts=true"});
  EXPECT_TRUE(contains(o.err, "dynamic_prompts is ignored: no prompt has alternatives, {a|b}, or wildcards")) << o.err;
  o = sample({"prompt=__what__", "dynamic_prompts=true"});
  EXPECT_EQ(o.status, 2);
  EXPECT_TRUE(contains(o.err, "wildcards_dir is empty")) << o.err;
}

TEST_F(Prompts, OfAFileAreGeneratedLineByLine) {
  const Outcome o = sample_lines(
      "\xef\xbb\xbfone, (heart:1.2) \"quoted\"\r\n"
      "\n"
      "--prompt \"a \\\"red\\\" [heart]\" --negative_prompt 'dull grey' --width 24 --height 16 --seed 5\n"
      "--prompt two words --cfg_scale 3 --seed 6\n"
      "  --width 24 --prompt \"--three\" \n"
      "--batch_size 2 --sampler_name 'Euler a' --num-inference-steps 3\n"
      "{x|x} four",
      {"prompt=of the keys", "dynamic_prompts=true", "sample_seed=2"});
  ASSERT_EQ(o.status, 0) << o.err;
  std::vector<std::string> all;
  for (int i = 0; i < 7; ++i) all.push_back(text_of(i));
  EXPECT_EQ(all, (std::vector<std::string>{"one, (heart:1.2) \"quoted\"||2|7.5|2|16x16",
                                           "a \"red\" [heart]|dull grey|2|7.5|5|24x16", "two words||2|3|6|16x16",
                                           "--three||2|7.5|2|24x16", "of the keys||3|7.5|2|16x16",
                                           "of the keys||3|7.5|2|16x16", "x four||2|7.5|2|16x16"}));
  EXPECT_FALSE(exists(image(7)));
  for (int i = 0; i < 7; ++i) EXPECT_EQ(again(i), read_file(image(i))) << i;
  // MaxDiffusion's command names also write one image per line, which replaces an older one.
  command = "generate_sd";
  ASSERT_EQ(sample_lines("one\ntwo", {"per_device_batch_size=3"}).status, 0);
  EXPECT_EQ(text_of(0) + text_of(1), "one||2|7.5|0|16x16two||2|7.5|0|16x16");
  fs::rename(t / "out", t / "kept");
  ASSERT_EQ(sample_lines("three\nfour", {"output_dir=" + (t / "kept")}).status, 0);
  fs::rename(t / "kept", t / "out");
  EXPECT_EQ(text_of(0) + text_of(1), "three||2|7.5|0|16x16four||2|7.5|0|16x16");
  EXPECT_FALSE(exists(image(2)));
}

TEST_F(Prompts, OfAFileThatDifferInTextsAndSeedsShareABatch) {
  const Outcome o = sample_lines(
      "red heart BREAK blue\n--prompt \"a heart\" --seed 5\n--prompt red --seed 6\n"  // two, and one
      "--prompt heart --negative_prompt dull --seed 7\n--prompt star --negative_prompt \"grey BREAK old\"\n"
      "--prompt star --negative_prompt dull --steps 3\n",
      {"per_device_batch_size=2", "prompt_syntax=a1111", "sample_seed=2", "scheduler=euler"});
  ASSERT_EQ(o.status, 0) << o.err;
  std::vector<std::string> counts;
  static const std::regex form("(\\d+) images? of 16x16 denoised");
  for (std::sregex_iterator m(o.err.begin(), o.err.end(), form), end; m != end; ++m) counts.push_back((*m)[1]);
  EXPECT_EQ(counts, (std::vector<std::string>{"2", "1", "2", "1"})) << o.err;
  std::vector<std::string> all;
  for (int i = 0; i < 6; ++i) all.push_back(text_of(i));
  EXPECT_EQ(all, (std::vector<std::string>{"red heart BREAK blue||2|7.5|2|16x16", "a heart||2|7.5|5|16x16",
                                           "red||2|7.5|6|16x16", "heart|dull|2|7.5|7|16x16",
                                           "star|grey BREAK old|2|7.5|2|16x16", "star|dull|3|7.5|2|16x16"}));
  for (int i = 0; i < 6; ++i) {  // alone
    again(i);
    const HostArray one = decode_image(t / "again/image_0.png"), together = decode_image(image(i));
    ASSERT_EQ(one.dims(), together.dims());
    int most = 0;
    for (size_t k = 0; k < one.view<uint8_t>().size(); ++k)
      most = std::max(most, std::abs(one.view<uint8_t>()[k] - together.view<uint8_t>()[k]));
    EXPECT_LE(most, 1) << i;
  }
  EXPECT_EQ(again(5), read_file(image(5)));  // it was alone
}

TEST_F(Prompts, OfAFileNameFileAndLineWhereTheyAreRefused) {
  const std::string file = t / "lines.txt";
  for (const auto& [line, message] : std::vector<std::pair<std::string, std::string>>{
           {"--promt x", ":2: the option --promt is unknown; expected one of: prompt, "},
           {"--promt x", "try: --prompt\n"},
           {"--guidance_scal 3", "try: --guidance_scale\n"},
           {"--only_image 0", ":2: the option --only_image is unknown"},
           {"--latents /etc/passwd", ":2: the option --latents is unknown"},
           {"--steps 2.5", ":2: num_inference_steps is `2.5`, expected a whole number"},
           {"--steps", ":2: --steps is given without its value; expected one, as in --steps VALUE"},
           {"--steps --prompt x", ":2: --steps is given without its value"},
           {"--prompt x --steps 2 3", ":2: '3'; expected an option"},
           {"--batch_size 2 --n_iter 2", ":2: --n_iter gives num_images_per_prompt again"},
           {"--prompt \"x", ":2: a quote \" is not closed"},
           {"--width 17", "in " + file + ":2\n"},
           {"__what__", "in " + file + ":2\n"}}) {
    const Outcome o = sample_lines("first\n" + line + "\n", {"dynamic_prompts=true"});
    EXPECT_EQ(o.status, 2) << line;
    EXPECT_TRUE(contains(o.err, message)) << line << "\n" << o.err;
    EXPECT_TRUE(contains(o.err, file + ":2")) << line << "\n" << o.err;
    EXPECT_FALSE(exists(image(0))) << line;  // fails before anything is generated
  }
  EXPECT_TRUE(contains(sample_lines("\n \n").err, "lines.txt' has no lines; expected a prompt on each"));
  EXPECT_TRUE(contains(sample({"prompt_file=" + (t / "none.txt")}).err, "none.txt"));
}

TEST_F(Prompts, WithLoraTagsAreSampledAsWithTheKeys) {
  model = MD_SOURCE_DIR "/tests/golden/pipelines/sdxl", prefix = "image_sdxl";
  make_folders(t / "loras/below");
  fs::copy(MD_SOURCE_DIR "/tests/golden/pipelines/lora_kohya.safetensors", t / "loras/style.safetensors");
  fs::copy(MD_SOURCE_DIR "/tests/golden/pipelines/lora_peft.safetensors", t / "loras/below/line.safetensors");
  const std::string style = t / "loras/style.safetensors", line = t / "loras/below/line.safetensors",
                    folder = "lora_dir=" + (t / "loras");
  const auto pixels = [&](const std::vector<std::string>& words) {
    const Outcome o = sample(words);
    EXPECT_EQ(o.status, 0) << o.err;
    return o.status == 0 ? pixels_of(image(0)) : o.err;
  };
  const std::string plain = pixels({"prompt=a heart"}),
                    styled = pixels({"prompt=a heart", "lora_files=" + style, "lora_scales=0.7"}),
                    both = pixels({"prompt=a heart", "lora_files=[" + line + ", " + style + "]", "lora_scales=1,0.7"});
  EXPECT_EQ((std::set<std::string>{plain, styled, both}.size()), 3u);
  EXPECT_EQ(pixels({"prompt=a heart<lora:style:0.7>", folder}), styled);
  EXPECT_TRUE(text_of(0).starts_with("a heart|")) << text_of(0);
  EXPECT_EQ(again(0), read_file(image(0)));
  EXPECT_EQ(pixels({"prompt=<lora:line>a heart<lora:style:0.7>", folder}), both);
  EXPECT_EQ(pixels({"prompt=a heart<lora:style:0.7>", folder, "lora_files=" + line}), both);
  EXPECT_EQ(pixels({"prompt={a heart<lora:below/line><lora:style:.7>}", folder, "dynamic_prompts=true"}), both);

  // Each line of a file may use other LoRAs.
  const Outcome lines = sample_lines("a heart\na heart<lora:style:0.7>\na heart", {folder});
  ASSERT_EQ(lines.status, 0) << lines.err;
  EXPECT_EQ(pixels_of(image(0)), plain);
  EXPECT_EQ(pixels_of(image(1)), styled);
  EXPECT_EQ(pixels_of(image(2)), plain);

  for (const auto& [words, message] : std::vector<std::pair<std::vector<std::string>, std::string>>{
           {{"prompt=<lora:stile:1>", folder},
            "prompt: <lora:stile:1> names no file below lora_dir='" + (t / "loras") +
                "'; expected one of: style, below/line"},
           {{"prompt=<lora:../loras/style>", folder}, "names no file below lora_dir"},
           {{"prompt=<lora:style:0.7>"}, "lora_dir is empty; expected the folder of 'style.safetensors'"},
           {{"prompt=<lora:style:a>", folder},
            "prompt: <lora:style:a> has 'a' as its scale; expected a number, as in <lora:NAME:SCALE>"},
           {{"prompt=<lora:style", folder}, "prompt: '<lora:' is not closed; expected <lora:NAME:SCALE>"},
           {{"prompt=a", "negative_prompt=<lora:style>", folder}, "negative_prompt names a LoRA file"},
           {{"prompt=[\"<lora:style>\", \"b\"]", folder}, "prompts that are sampled together name different"}}) {
    const Outcome o = sample(words);
    EXPECT_EQ(o.status, 2);
    EXPECT_TRUE(contains(o.err, message)) << message << "\n" << o.err;
  }
  const Outcome o = sample({"prompt=a heart", folder});
  EXPECT_TRUE(contains(o.err, "lora_dir is ignored: no prompt names a LoRA file")) << o.err;
}

TEST_F(Prompts, WithLoraTagsOfBlocksAndStepsAreSampledAsWithTheKeys) {
  model = MD_SOURCE_DIR "/tests/golden/pipelines/sdxl", prefix = "image_sdxl";
  make_folders(t / "loras");
  fs::copy(MD_SOURCE_DIR "/tests/golden/pipelines/lora_kohya.safetensors", t / "loras/style.safetensors");
  const std::string folder = "lora_dir=" + (t / "loras"), file = "lora_files=" + (t / "loras/style.safetensors");
  const std::string blocks = "1,0,0.5,1,0,2,1,0,1,0.25";  // of the tiny model: text, IN00 to IN03, M00, OUT00 to OUT03
  const auto pixels = [&](std::vector<std::string> words) {
    words.insert(words.end(), {"num_inference_steps=4", "guidance_scale=3"});
    const Outcome o = sample(words);
    EXPECT_EQ(o.status, 0) << o.err;
    return o.status == 0 ? pixels_of(image(0)) : o.err;
  };
  const auto tag = [&](const std::string& parameters) {
    return pixels({"prompt=a heart<lora:style" + parameters + ">", folder});
  };
  const auto keys = [&](std::vector<std::string> words) {
    words.insert(words.end(), {"prompt=a heart", file});
    return pixels(words);
  };
  const std::string plain = tag("");
  std::set<std::string> all = {plain};
  for (const auto& [parameters, words] : std::vector<std::pair<std::string, std::vector<std::string>>>{
           {":9:lbw=" + blocks, {"lora_scales=9", "lora_block_weights=" + blocks}},
           {":9:step=1-3", {"lora_scales=9", "lora_steps=1-3"}},
           {":9:0.5", {"lora_text_scales=9", "lora_scales=0.5"}},
           {":lbw=" + blocks + ":stop=0.5:unet=8",
            {"lora_scales=8", "lora_text_scales=1", "lora_steps=-0.5", "lora_block_weights=" + blocks}}}) {
    const std::string tagged = tag(parameters);
    EXPECT_EQ(tagged, keys(words)) << parameters;
    EXPECT_TRUE(all.insert(tagged).second) << parameters;
  }
  EXPECT_EQ(tag(":9:" + blocks), tag(":9:lbw=" + blocks));
  EXPECT_EQ(again(0), read_file(image(0)));
  EXPECT_EQ(tag(":te=9:unet=0.5"), tag(":9:0.5"));
  EXPECT_EQ(tag(":9:start=1:stop=3"), tag(":9:step=1-3"));
  EXPECT_EQ(tag(":9:lbw=ALL:step=-"), tag(":9"));
  // Next to a file of the keys.
  EXPECT_EQ(
      pixels({"prompt=a heart<lora:style:9:step=1-3>", folder, file, "lora_scales=2"}),
      pixels({"prompt=a heart", "lora_files=" + (t / "loras/style.safetensors") + "," + (t / "loras/style.safetensors"),
              "lora_scales=2,9", "lora_steps=-,1-3"}));
  for (const auto& [parameters, message] : std::vector<std::pair<std::string, std::string>>{
           {":1:lbw=1,0", "lora_block_weights '1,0' are 2; expected 10 (BASE, IN00, IN01, IN02, IN03, M00, "},
           {":1:lbwe=ATTNON", "<lora:style:1:lbwe=ATTNON> has 'lbwe=ATTNON'; expected <lora:NAME:SCALE>, or with te="},
           {":1:1:3", "has '3'; expected <lora:NAME:SCALE>"},
           {":1:step=5", "has '5' as its steps; expected numbers, as in start=5, stop=0.8 or step=5-10"},
           {":1:step=1-2:stop=3", "has step= and start= or stop=; expected one of them"}}) {
    const Outcome o = sample({"prompt=a heart<lora:style" + parameters + ">", folder});
    EXPECT_EQ(o.status, 2) << parameters;
    EXPECT_TRUE(contains(o.err, message)) << message << "\n" << o.err;
  }
  const Outcome none = sample({"prompt=a heart<lora:style:1:start=50>", folder});
  EXPECT_TRUE(contains(none.err, "is ignored: it acts in none of the 2 steps")) << none.err;
  const Outcome merged = maxdiffusion({"lora", "merge", model, t / "merged", file, "lora_steps=1-2"});
  EXPECT_EQ(merged.status, 2);
  EXPECT_TRUE(contains(merged.err, "lora_steps is given; expected none: merged weights are the same in all steps"))
      << merged.err;
}

TEST_F(Prompts, OfAnImageNameNoFolders) {
  ASSERT_EQ(sample({"prompt=a heart"}).status, 0);
  const std::string bytes = read_file(image(0)), hostile = t / "hostile.png";
  std::string settings =
      png_texts({reinterpret_cast<const uint8_t*>(bytes.data()), bytes.size()}, "0").at("maxdiffusion");
  settings += "dynamic_prompts: true\nwildcards_dir: /etc\nprompt_file: /etc/passwd\nlora_dir: /etc\n";
  write_png(hostile, HostArray(Shape{DType::u8, {8, 8, 3}}), {{"maxdiffusion", settings}});
  const Outcome o = maxdiffusion({"generate", hostile, kQuick, "output_dir=" + (t / "again")});
  ASSERT_EQ(o.status, 0) << o.err;
  for (const char* key : {"dynamic_prompts", "wildcards_dir", "prompt_file", "lora_dir"})
    EXPECT_TRUE(contains(o.err, std::string(key) + " ignored: '" + hostile + "' names it")) << key << o.err;
  EXPECT_EQ(pixels_of(t / "again/image_0.png"), pixels_of(image(0)));
}

class Xy : public Prompts {};

TEST_F(Xy, GeneratesEveryCombinationAndASheet) {
  ASSERT_EQ(sample({"prompt=[heart, star]", "sample_seed=4", "xy=cfg:3,5,7;sampler:euler,ddim"}).status, 0);
  // Row by row, with both prompts for each cell.
  for (int i = 0; i < 12; ++i) {
    const std::string bytes = read_file(image(i));
    const std::string text =
        png_texts({reinterpret_cast<const uint8_t*>(bytes.data()), bytes.size()}, image(i)).at("parameters");
    EXPECT_TRUE(contains(text, fmt::format("CFG scale: {},", (i / 2 % 3) * 2 + 3))) << i << text;
    EXPECT_EQ(contains(text, "Sampler: DDIM,"), i >= 6) << i << text;
    EXPECT_TRUE(text.starts_with(i % 2 ? "star\n" : "heart\n")) << text;
  }
  EXPECT_FALSE(exists(image(12)));
  EXPECT_EQ(again(7), read_file(image(7)));
  for (int sheet = 0; sheet < 2; ++sheet) {
    const HostArray rgb = decode_image(t / fmt::format("out/sheet_{}.png", sheet));
    std::vector<HostArray> cells;
    for (int i = sheet; i < 12; i += 2) cells.push_back(decode_image(image(i)));
    const HostArray expected = make_sheet(cells, {"cfg: 3", "cfg: 5", "cfg: 7"}, {"sampler: euler", "sampler: ddim"});
    EXPECT_EQ(rgb.shape(), expected.shape());
    EXPECT_TRUE(std::ranges::equal(rgb.view<uint8_t>(), expected.view<uint8_t>()));
  }
  // Values with commas, a single axis, different sizes.
  ASSERT_EQ(sample({"prompt=heart", "xy=prompt:\"a heart, red\", star;width:16,24"}).status, 0);
  EXPECT_EQ(text_of(0), "a heart, red||2|7.5|0|16x16");
  EXPECT_EQ(text_of(3), "star||2|7.5|0|24x16");
  ASSERT_EQ(sample({"prompt=heart", "xy=guidance_interval:[0, 0.5],[0, 1]"}).status, 0);
  EXPECT_NE(read_file(image(0)), read_file(image(1)));
  EXPECT_FALSE(exists(image(2)));
}

TEST_F(Xy, RefusesWhatIsNoAxis) {
  for (const auto& [xy, message] : std::vector<std::pair<std::string, std::string>>{
           {"3,5", "xy: '3,5' is no axis"},
           {"cgf:3", "xy: 'cgf' cannot be an axis"},
           {"weights_dtype:float32,bfloat16", "xy: 'weights_dtype' cannot be an axis"},
           {"num_images_per_prompt:1,2", "xy: 'num_images_per_prompt' cannot be an axis"},
           {"cfg:3,,5", "xy: cfg has an empty value"},
           {"cfg:3;guidance_scale:5", "xy: guidance_scale is both axes"},
           {"cfg:3;steps:5;seed:1", "xy has 3 axes; expected one or two"},
           {"sampler:euler,dmp", "dmp"},
           {"cfg:three", "guidance_scale"}}) {
    const Outcome o = sample({"prompt=heart", "xy=" + xy});
    EXPECT_EQ(o.status, 2) << o.err;
    EXPECT_TRUE(contains(o.err, message)) << xy << "\n" << o.err;
    EXPECT_FALSE(exists(image(0)));
  }
  const Outcome o = sample({"prompt=heart", "xy=cfg:3", "output_type=latent"});
  EXPECT_TRUE(contains(o.err, "xy is given with output_type=latent")) << o.err;
}

TEST_F(Prompts, AVideoOfAModelOfImagesIsRefusedBeforeSampling) {
  const Outcome o = sample({"prompt=heart", "output_type=mp4"});
  EXPECT_EQ(o.status, 2) << o.err;
  EXPECT_TRUE(contains(o.err, "output_type is mp4; expected png, np or latent: this model generates images")) << o.err;
  EXPECT_FALSE(contains(o.err, "encoded after")) << o.err;
}

}  // namespace
}  // namespace md
